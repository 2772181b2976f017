"""Measuring from outside: load, reports, budgets."""
