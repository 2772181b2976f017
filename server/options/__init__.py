"""The parts of the settings, and what single flags mean. settings.py puts them together."""
