"""What Ray has under ``ray.util``, for programs that look for it there."""
