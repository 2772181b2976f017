"""The check of a GPU, part by part: `python -m penstock.perf.gpu_check` runs them (docs/gpu-check.md)."""
