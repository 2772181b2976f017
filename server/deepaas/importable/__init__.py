"""What user code imports of deepaas, where deepaas is not installed."""
