"""Faults that are known not to be survived, and why: what is here is no part of a usual run."""

UNSURVIVED: dict[str, str] = {}
