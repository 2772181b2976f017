"""Payloads: what the generator sends, made from a model's description before the first request goes."""
