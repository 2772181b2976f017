"""Requests, rows, time and fairness: what decides who runs together, and when."""
