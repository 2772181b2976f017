"""Tuning: `penstock perf tune`: settings tried on the live server under a target, and those kept that are better."""
