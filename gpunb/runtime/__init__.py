"""Carries out what the core decides: one inbox, one thread."""
