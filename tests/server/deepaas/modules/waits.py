"""A model whose calls say over a named pipe that they have begun, and then do as they are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from marshmallow import fields

ARGUMENTS = {"told": fields.Str(missing=""), "how": fields.Str(missing="pause")}


def get_metadata() -> dict[str, str]:
    """Say which process this is."""
    return {"author": "A", "summary": str(os.getpid())}


def get_predict_args() -> dict[str, Any]:
    """Give the arguments of `do`."""
    return ARGUMENTS


def get_train_args() -> dict[str, Any]:
    """Give those, and others."""
    return {
        **ARGUMENTS,
        "must": fields.Int(missing=1),
        "data": fields.Field(missing=None, type="file", location="form"),
    }


def do(told: str, how: str) -> dict[str, float]:
    """Say so, and do as told."""
    pids = [os.getpid()]
    if how == "child":
        pids.append(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid)
    if told:
        Path(told).write_text(" ".join(map(str, pids)))
    if how in ("pause", "child"):
        signal.pause()
    if how == "raise":
        raise ValueError("train boom")
    if how == "exit":
        os._exit(3)
    return {"acc": 0.9}


def predict(told: str, how: str) -> dict[str, float]:
    """Do it."""
    return do(told, how)


def train(told: str, how: str, must: int, data: Any) -> dict[str, Any]:
    """Do it, or read a file; and write lines, as trainings do."""
    sys.stdout.write("Epoch 1/2\n")
    sys.stderr.write("by stderr\n")
    if data is not None:
        return {"path": data.filename, "content": Path(data.filename).read_text()}
    return do(told, how)
