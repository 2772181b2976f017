"""Isolated: a Backend in a process of its own, for a runtime that shall share none with another."""
