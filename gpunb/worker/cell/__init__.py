"""A notebook's cell in its worker."""
