"""Puts the shim of `seldon_core` last on this process's path, as in a worker where seldon-core is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.server.seldon import importable

sys.path.append(str(Path(importable.__file__).parent))
