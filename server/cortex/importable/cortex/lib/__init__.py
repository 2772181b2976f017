"""The package that Cortex's logger is in."""
