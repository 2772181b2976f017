"""Sequence models: their requests in order, with their controls, states and slots."""
