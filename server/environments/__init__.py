"""The Pythons that worker processes run on: the server's own, one that is there, or one made of a requirements file."""
