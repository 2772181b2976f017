"""Truth: the load generator held against theory and other clients. `python -m penstock.perf.truth`."""
