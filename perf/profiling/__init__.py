"""Profiling: `penstock perf -m MODEL`: loads level by level until each is stable, with the server's own statistics."""
