"""OpenVINO, where it is not installed: a stand-in has the provider's name. tests/clients/test_openvino.py has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from penstock.backends import onnx, onnx_openvino
from penstock.backends.errors import Code, InferError
from penstock.backends.onnx import OnnxBackend, load
from penstock.backends.onnx_providers import CPU, OPENVINO
from tests.backends.contract import batched, infer
from tests.backends.onnx_models import FLOAT, INT64, contract_model, ints, node, save, value

ASKED = {"openvino": "1"}


class StandIn:
    """A session on the CPU that says it has OpenVINO, if that is to start."""

    def __init__(self, session: Any, providers: list[str]) -> None:
        self._session = session
        self._providers = providers

    def get_providers(self) -> list[str]:
        return self._providers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have the provider; what it was asked for is in the list, with the session's options before it."""
    seen: list[Any] = []

    def start(model: str | bytes, made: Any, providers: Sequence[tuple[str, dict[str, str]]]) -> Any:
        seen.extend([made, *providers])
        return StandIn(onnx.start(model, made, providers[1:]), [OPENVINO, CPU])

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [OPENVINO, CPU])
    monkeypatch.setattr(onnx_openvino, "start", start)
    return seen


def refusal(path: Path) -> InferError:
    with pytest.raises(InferError) as caught:
        load(path, "cpu", ASKED)
    return caught.value


def adding(path: Path) -> OnnxBackend:
    """Load y = x + 1, in INT64."""
    save(
        path, [node("Add", ["x", "one"], ["y"])], [value("x", INT64, ["N"])], [value("y", INT64, ["N"])],
        {"one": ints([1])},
    )  # fmt: skip
    return load(path, "cpu", ASKED)


def test_a_build_without_it_is_refused_with_what_to_install(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])

    error = refusal(contract_model("rows", path))

    assert error.code is Code.UNSUPPORTED
    assert error.message.startswith(f"the onnxruntime {onnxruntime.__version__} here has no OpenVINO")
    assert error.message.endswith(": uninstall it, and install onnxruntime-openvino in its place")


def test_it_goes_before_the_cpu_with_the_models_threads_and_precision(path: Path, asked: list[Any]) -> None:
    backend = load(contract_model("rows", path), "cpu", {**ASKED, "intra_op_thread_count": "3"})

    assert backend.device == "cpu"
    assert asked[1:] == [
        (OPENVINO, {"device_type": "CPU", "precision": "FP32", "num_of_threads": "3"}),
        (CPU, {}),
    ]


def test_a_model_that_does_not_ask_for_it_is_run_without(path: Path, asked: list[Any]) -> None:
    load(contract_model("rows", path), "cpu", {"openvino": "0"})
    load(contract_model("rows", path), "cpu", {})

    assert asked == []


def test_one_that_does_not_start_is_refused(
    path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(
        onnx_openvino, "start", lambda model, made, providers: StandIn(onnx.start(model, made, providers[1:]), [CPU])
    )

    error = refusal(contract_model("rows", path))

    assert error.code is Code.UNSUPPORTED
    assert error.message.startswith("OpenVINO does not start: ")


def test_a_model_that_it_cannot_have_says_that_it_was_to(path: Path, asked: list[Any]) -> None:
    path.write_bytes(b"no model")

    error = refusal(path)

    assert error.code is Code.INVALID
    assert error.message.startswith("with OpenVINO: onnx runtime error")


def test_an_initializer_is_no_input_since_it_would_be_ignored(path: Path, asked: list[Any]) -> None:
    contract_model("optional", path)

    assert [spec.name for spec in load(path, "cpu", {}).graph.inputs] == ["x", "offset"]
    assert [spec.name for spec in load(path, "cpu", ASKED).graph.inputs] == ["x"]


@pytest.mark.parametrize("wide", [2**31, -(2**31) - 1])
def test_an_integer_that_it_would_cut_is_refused_and_the_next_is_served(
    path: Path, asked: list[Any], wide: int
) -> None:
    backend = adding(path)
    binding = backend.bind(batched(backend.graph), 4)

    for _ in range(2):
        with pytest.raises(InferError, match=f"input 'x' has {wide}, and OpenVINO computes INT64 in 32 bits") as caught:
            infer(binding, [ints([7, wide])])
        assert caught.value.code is Code.INVALID
        (found,) = infer(binding, [ints([2**31 - 2, -(2**31)])])
        assert found.tolist() == [2**31 - 1, -(2**31) + 1]


def test_rows_without_elements_have_no_integer_that_it_would_cut(path: Path, asked: list[Any]) -> None:
    backend = adding(path)

    assert infer(backend.bind(batched(backend.graph), 4), [ints([])])[0].shape == (0,)


def test_words_about_a_device_do_not_lose_it(
    path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def fail(*args: Any) -> None:
        raise RuntimeError("device-side assert triggered")

    for run in ("run", "run_with_iobinding"):
        monkeypatch.setattr(StandIn, run, fail, raising=False)
    save(path, [node("Relu", ["x"], ["y"])], [value("x", FLOAT, ["N"])], [value("y", FLOAT, ["N"])])
    backend = load(path, "cpu", ASKED)
    binding = backend.bind(batched(backend.graph), 4)

    with pytest.raises(InferError) as caught:
        infer(binding, [np.ones(2, np.float32)])

    assert type(caught.value) is InferError
    assert caught.value.code is Code.INTERNAL
