"""What user code imports of deepaas, where deepaas is not installed.

This package stands last on a worker's path. Source: deepaas 2.6.0.
"""

__version__ = "2.6.0"


def extract_version() -> str:
    """Give the version that this stands for."""
    return __version__
