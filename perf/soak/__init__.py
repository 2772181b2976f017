"""Soak: a server under mixed load with a fault every few seconds. `python -m penstock.perf.soak`."""
