"""The user's code before and after inference. Worker processes import parts of it, so nothing is imported here."""
