"""What user code imports of deepaas, where deepaas is not installed."""

from . import base, wrapper

__all__ = ["base", "wrapper"]
