"""Queueing, scheduling and admission control: order of service, batch sizes, and which requests are rejected."""
