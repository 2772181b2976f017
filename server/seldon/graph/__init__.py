"""Inference graphs: components connected by a manifest or a small file, called as Seldon's orchestrator calls them."""
