"""Data between processes: shared memory segments, and serialization."""
