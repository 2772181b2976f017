"""Model repositories: what is on disk, how each model is configured, and which models are served."""
