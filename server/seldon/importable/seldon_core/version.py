"""The version of seldon-core that this package substitutes."""

__version__ = "1.17.1"
