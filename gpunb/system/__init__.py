"""The operating system: Linux calls, the event loop, sockets, signals and processes."""
