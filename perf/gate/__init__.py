"""The gate: `make bench-gate` and `penstock perf gate` report what has become slower than in budgets.toml."""
