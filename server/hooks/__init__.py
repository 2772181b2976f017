"""The user's code before and after inference."""

from __future__ import annotations

from .loading import check_file
from .replicas import Plan, plan
from .runner import Hooks, Inference
from .writes import GlobalWrite, writes_globals, written_globals

__all__ = ["GlobalWrite", "Hooks", "Inference", "Plan", "check_file", "plan", "writes_globals", "written_globals"]
