"""The classes that components share with the calling code: seldon_core's own, if the original is installed.

Importing this makes `seldon_core` importable, from the end of the path.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

_IMPORTABLE = str(Path(__file__).parents[1] / "importable")

if _IMPORTABLE not in sys.path:
    sys.path.append(_IMPORTABLE)

_user_model: Any = import_module("seldon_core.user_model")
SeldonMicroserviceException: Any = import_module("seldon_core.flask_utils").SeldonMicroserviceException
SeldonComponent: Any = _user_model.SeldonComponent
SeldonNotImplementedError: Any = _user_model.SeldonNotImplementedError
SeldonResponse: Any = _user_model.SeldonResponse
