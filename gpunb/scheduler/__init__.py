"""Decides which task runs where and when: values and rules, without input or output.

Nothing in this package does input or output, starts threads, reads a clock or rolls dice.
"""
