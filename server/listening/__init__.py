"""Ports: how connections are taken, kept and ended, and where large bodies are put."""
