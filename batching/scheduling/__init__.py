"""What waits for a model, in which order, how much of it runs together, and who is refused at the door."""
