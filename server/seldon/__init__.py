"""Seldon Core's Python components, served unchanged: docs/seldon.md."""
