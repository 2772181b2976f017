"""GPUs: what NVML reports about them, and how models use them, for the metrics page. See docs/metrics.md."""
