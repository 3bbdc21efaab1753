"""The messages between processes: channels, requests, sinks, and the interface of a backend."""
