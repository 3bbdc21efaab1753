"""Processes that run code: how they are started, spoken to and ended."""
