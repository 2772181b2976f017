"""What is on disk: models, versions, configuration."""
