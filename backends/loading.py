"""The Loaders by backend name. Importing this imports no runtime: the first load with a backend does.

Used by the composition root, which passes `LOADERS` to the Engine, and by the worker processes that load the backends
in `ISOLATED`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from .backend import Backend, Loader
from .errors import Code, InferError
from .partial_import import import_parts


def load_onnx(path: Path, device: str, options: Mapping[str, str]) -> Backend:
    """Load an ONNX model with ONNX Runtime.

    Raises: InferError; UNSUPPORTED if ONNX Runtime is not installed or cannot be imported.
    """
    try:
        from . import onnx
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "onnxruntime":
            raise
        extra = "cpu" if device == "cpu" else "gpu"
        other_extra = "gpu" if device == "cpu" else "cpu"
        text = f"ONNX Runtime is not installed: pip install 'penstock[{extra}]' (or 'penstock[{other_extra}]')"
        raise InferError(Code.UNSUPPORTED, text) from error
    except ImportError as error:
        raise InferError(Code.UNSUPPORTED, f"ONNX Runtime could not be imported: {error}") from error
    return onnx.load(path, device, options)


def import_tensorflow() -> None:
    """Import the parts of TensorFlow that tensorflow.py needs. Raises: ImportError."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only; TensorFlow reads it on import
    import_parts("tensorflow", ("python.client.session", "python.saved_model.loader_impl"))


def load_tensorflow(path: Path, device: str, options: Mapping[str, str]) -> Backend:
    """Load a SavedModel with TensorFlow, in a process that is not the server's.

    Raises: InferError; UNSUPPORTED if TensorFlow is not installed or cannot be imported.
    """
    try:
        import_tensorflow()
        from . import tensorflow
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "tensorflow":
            raise
        text = "TensorFlow is not installed: pip install 'penstock[tensorflow]'"
        raise InferError(Code.UNSUPPORTED, text) from error
    except ImportError as error:
        raise InferError(Code.UNSUPPORTED, f"TensorFlow could not be imported: {error}") from error
    return tensorflow.load(path, device, options)


LOADERS: Mapping[str, Loader] = MappingProxyType({"onnxruntime": load_onnx})
"""The backends that may be loaded in the server's own process."""

ISOLATED: Mapping[str, Loader] = MappingProxyType({"tensorflow": load_tensorflow})
"""The backends that are loaded only in their own process (server/isolated)."""

HARMLESS_LINES: tuple[str, ...] = (
    "All log messages before absl::InitializeLog() is called",
    "oneDNN custom operations are on.",
)
"""Texts of lines that the runtimes of `ISOLATED` write with every load although nothing is wrong. No setting prevents
TensorFlow from writing them."""
