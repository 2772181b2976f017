"""The folder that is on sys.path of a Python model's worker, for the processes that model.py starts (`loading.py`)."""
