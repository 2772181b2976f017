"""Ports: how connections are accepted, kept and closed, and where large bodies are stored."""
