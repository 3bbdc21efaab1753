"""Machine-wide leases: which session holds what of each device."""
