"""Worker processes as the kernel sees them: how they start, get work and end."""
