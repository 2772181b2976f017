"""What handlers may import of Cortex itself: its logger. Source: Cortex 0.9 and 0.10, whose examples do."""
