"""Isolated Backends: each runs in a process of its own, for runtimes that must not share the server's."""
