"""The fields of a ModelConfig, with a module for each group. Used by model_config.py.

Each module has `HONOURED`, `REFUSED`, `DOCUMENTATION` and `HINTS` if it has such fields, and `read(context)`.
"""
