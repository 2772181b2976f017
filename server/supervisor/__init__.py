"""The supervisor: starts the processes of one server, watches them, replaces them, and ends them in order."""
