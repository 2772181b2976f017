"""Baselines: the least that other approaches cost with the same models; the benchmarks start or run them."""
