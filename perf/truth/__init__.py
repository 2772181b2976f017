"""Truth: the load generator checked against theory and other clients. `python -m penstock.perf.truth`."""
