"""Batches and what runs them: Instances, one run, and what happens when one fails."""
