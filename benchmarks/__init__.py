"""Measurements of gpunb, of what the system itself needs, and of the alternatives."""
