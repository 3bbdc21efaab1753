"""Runs the tests of other projects on gpunb, and compares the outcomes with kept lists."""
