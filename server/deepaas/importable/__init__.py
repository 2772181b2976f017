"""A substitute for deepaas, for user code, if deepaas is not installed."""
