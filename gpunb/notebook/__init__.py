"""What a notebook shows and types: the magics, names in and out, output, the monitor."""
