"""Profiling: `penstock perf -m MODEL`: load level by level until each is stable, beside what the server says of it."""
