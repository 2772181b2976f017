"""What runs in the worker process of a Python model: the model.py, and the module that it talks to Triton with."""
