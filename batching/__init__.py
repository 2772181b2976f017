"""Requests, rows, time and fairness: decides which requests run together, and when."""
