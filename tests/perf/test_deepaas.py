"""What perf/deepaas.py installs and asks."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.perf.deepaas import CALLS, MODULES, UPLOAD_BYTES, arguments, ask, install, upload
from penstock.perf.server_process import Process
from penstock.server.deepaas.inside.multipart import Upload, read_multipart


def test_the_modules_are_installed_as_those_of_users(tmp_path: Path) -> None:
    install(tmp_path)

    (distribution,) = importlib.metadata.distributions(path=[str(tmp_path)])

    assert {point.name: point.value for point in distribution.entry_points} == {name: name for name in MODULES}
    assert {point.group for point in distribution.entry_points} == {"deepaas.v2.model"}
    assert all((tmp_path / f"{name}.py").exists() for name in MODULES)


def test_an_upload_is_a_form_with_one_file() -> None:
    call = upload()

    ((name, (stored,)),) = read_multipart(call.bodies[0], 0, call.headers["Content-Type"]).items()

    assert isinstance(stored, Upload)
    assert (name, stored.filename, stored.content.nbytes) == ("data", "a.bin", UPLOAD_BYTES)


def test_the_modules_give_the_expected_predictions(tmp_path: Path) -> None:
    content = tmp_path / "stored"
    content.write_bytes(bytes(UPLOAD_BYTES))
    stored = SimpleNamespace(filename=str(content), original_filename="a.bin")

    assert predicted("flowers", **json.loads(arguments().bodies[0]), scale=2.0) == CALLS["arguments"][1]
    assert predicted("uploads", data=stored) == CALLS["upload"][1]


def test_a_side_with_a_wrong_prediction_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "request", lambda *_: b'{"status": "OK", "predictions": 5}')

    with pytest.raises(RuntimeError, match=r"flowers/predict/\?scale=2: .*5"):
        ask(Process(0, 0))


def predicted(name: str, **arguments: Any) -> Any:
    """Give what a module predicts."""
    names: dict[str, Any] = {}
    exec(MODULES[name], names)
    return names["predict"](**arguments)
