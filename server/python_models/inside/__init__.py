"""What runs in the worker process of a Python model: model.py, and the module through which it calls Triton."""
