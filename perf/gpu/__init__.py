"""The check of a machine with a GPU, part by part: `python -m penstock.perf.gpu_check` runs them (docs/gpu.md)."""
