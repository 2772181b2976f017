"""The Pythons that run worker processes: the server's own, an existing one, or one built from a requirements file."""
