"""A folder on the sys.path of a Python model's worker, for processes that model.py starts (`inside/loading.py`)."""
