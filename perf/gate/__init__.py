"""The gate: `make bench-gate` and `penstock perf gate` say what has become slower than budgets.toml has it."""
