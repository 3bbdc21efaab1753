"""Values and rules: what may run where, and when.

Nothing in this package does input or output, starts threads, reads a clock or rolls dice.
"""
