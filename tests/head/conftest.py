"""Fixtures for tests of head processes."""

from tests.head.heads import head, own_folder

__all__ = ["head", "own_folder"]
