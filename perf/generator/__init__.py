"""The load generator: processes that keep a server busy, and record when every request began and ended."""
