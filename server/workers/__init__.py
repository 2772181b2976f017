"""Worker processes, which isolate user code from the server. Hooks and Python models run in them."""
