"""What handlers may import from Cortex: its logger. Source: Cortex 0.9 and 0.10, whose examples do."""
