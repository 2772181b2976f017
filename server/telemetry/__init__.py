"""Observability: metrics, hardware samples, logs."""
