"""Cortex: serves the projects and request handlers of Cortex 0.9 and 0.10 as Cortex does."""
