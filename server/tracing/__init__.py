"""Tracing: which requests are traced, and where their traces go. See docs/tracing.md."""
