"""Python models: Triton's model.py, served in worker processes."""
