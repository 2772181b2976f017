"""Inside: what runs in the worker of an ABEJA handler."""
