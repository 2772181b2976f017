"""Cortex: projects of cortex.yaml and request handlers, of versions 0.9 and 0.10, served as Cortex served them."""
