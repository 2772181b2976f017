"""Answers that are remembered."""
