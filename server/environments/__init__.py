"""Environments: the Pythons that workers run on, made from what a project asks for and kept."""
