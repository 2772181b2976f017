"""Payloads: what the generator sends, built from a model's description before the first request."""
