"""Fixtures for tests of head processes."""

from tests.runtime.heads import head, own_folder

__all__ = ["head", "own_folder"]
