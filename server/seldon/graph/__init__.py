"""Inference graphs: components wired by a manifest or a small file, called as Seldon's orchestrator called them."""
