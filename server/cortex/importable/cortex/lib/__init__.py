"""The package of Cortex's logger."""
