"""Bytes, sockets, processes, files and dialects: everything between a client and the Engine."""
