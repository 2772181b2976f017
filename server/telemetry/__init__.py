"""What a server tells of itself: metrics, the machine's samples, logs."""
