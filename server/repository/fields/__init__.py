"""The fields of a ModelConfig, a module for each part of it. Called by model_config.py.

Each module has `HONOURED`, `REFUSED`, `DOCUMENTATION` and `HINTS` where it has such fields, and `read(notes)`.
"""
