"""Batches and what runs them: Instances, single runs, and the handling of failed runs."""
