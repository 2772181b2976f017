"""Files: what is on disk, what it says about each model, and what of it is served."""
