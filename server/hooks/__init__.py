"""The user's code before and after inference."""
