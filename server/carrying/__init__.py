"""Carried calls: calls sent unread to a model's worker process, which answers them one after another."""
