"""The user's code before and after inference. Worker processes import parts of it: nothing is imported here."""
