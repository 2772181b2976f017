"""The load generator checked against theory and other clients. `python -m penstock.perf.generator_accuracy`."""
