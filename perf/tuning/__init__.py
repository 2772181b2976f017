"""Tuning: `penstock perf tune` tries settings on the live server, under a target, and keeps those that are better."""
