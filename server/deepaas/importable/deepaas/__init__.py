"""A substitute for deepaas, for user code, if deepaas is not installed.

This package is last on a worker's path. Source: deepaas 2.6.0.
"""

__version__ = "2.6.0"


def extract_version() -> str:
    """Return the version that this package substitutes."""
    return __version__
