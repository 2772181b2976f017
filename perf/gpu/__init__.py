"""The GPU check, part by part: `python -m penstock.perf.gpu_check` runs it (docs/gpu-check.md)."""
