"""Carries out what the scheduler decides, on one thread with one inbox."""
