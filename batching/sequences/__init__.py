"""Sequence models: requests that follow one another, their controls, states and places."""
