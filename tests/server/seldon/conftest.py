"""`seldon_core` as a worker without the original finds it: last on the path, in this process too."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.server.seldon import importable

sys.path.append(str(Path(importable.__file__).parent))
