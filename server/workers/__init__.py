"""Worker processes: the user's code where it can hurt nobody. Hooks and Python models run in them."""
