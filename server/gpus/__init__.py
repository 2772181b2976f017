"""GPUs: what NVML tells of them, and what models take of them, for the metrics page. See docs/metrics.md."""
