"""The control socket of a session: other processes ask for its status and stop its jobs."""
