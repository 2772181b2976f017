"""A substitute for deepaas, for user code, if deepaas is not installed."""

from . import base, wrapper

__all__ = ["base", "wrapper"]
