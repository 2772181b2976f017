"""Inside: the code that runs in the worker of an ABEJA handler."""
