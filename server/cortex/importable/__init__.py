"""The last folder on the import path of a Cortex project: a substitute for Cortex's own modules."""
