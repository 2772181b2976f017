"""Carrying: models whose calls go to a worker process as they came, and are answered there one after another."""
