"""Questions: the benchmark's models with rows to send, and onnxruntime's result for each without a server."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .serving import Model
from .wires import Array

MODELS = ("iris", "mlp", "cnn")
_MAX_BYTES = 1 << 20
"""Limit for the rows of a model: they are sent to the generator, and larger ones fit in no cache anyway."""
_MAX_ROWS, _MIN_ROWS = 8, 2


class MissingModelsError(Exception):
    """The models cannot be made. The text says what to install."""


def prepare(names: tuple[str, ...]) -> dict[str, Model]:
    """Make the models that do not exist. Raises: MissingModelsError."""
    try:
        from penstock.perf import models

        models.make(models.DEFAULT_FOLDER)
        return {name: _model(name, models.DEFAULT_FOLDER / name / "1" / "model.onnx") for name in names}
    except ModuleNotFoundError as error:
        raise MissingModelsError(f"the models are made with {error.name}: pip install onnx onnxruntime") from error


def _model(name: str, file: Path) -> Model:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    shape = (1, *session.get_inputs()[0].shape[1:])
    rows = questions(shape)
    return Model(name, file, rows, tuple(session.run(None, {"input": row})[0] for row in rows))


def questions(shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Return rows with 4 decimals, whose JSON has a realistic length."""
    random = np.random.default_rng(5)
    count = min(_MAX_ROWS, max(_MIN_ROWS, _MAX_BYTES // (4 * int(np.prod(shape)))))
    return tuple(np.round(random.random(shape, np.float32), 4) for _ in range(count))
