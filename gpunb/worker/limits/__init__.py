"""The limits of a worker on its devices and CPUs."""
