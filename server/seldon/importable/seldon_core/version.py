"""The version of seldon-core that this package stands in for."""

__version__ = "1.17.1"
