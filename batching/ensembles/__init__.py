"""Models made of models: a request's way through their steps."""
