"""Which object an entry point names, and which methods a model has."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.server.carrying.messages import read_answer
from penstock.server.deepaas.inside.answers import Refusal
from penstock.server.deepaas.inside.model import WrappedModel

from .worker_calls import NAME


class Ordinary:
    instances = 0

    def __init__(self) -> None:
        type(self).instances += 1

    def predict(self) -> Any:
        return self


class Static:
    def __init__(self, needed: int) -> None:
        raise AssertionError("not to be instantiated")

    @staticmethod
    def get_metadata() -> dict[str, Any]:
        return {"author": "static"}

    @classmethod
    def predict(cls) -> Any:
        return cls

    def other(self) -> None:
        """Have no role in a model."""


class Mixed(Ordinary):
    @staticmethod
    def get_metadata() -> dict[str, Any]:
        return {}


def model_of(monkeypatch: pytest.MonkeyPatch, found: Any, target: str = NAME) -> WrappedModel:
    """Load a model from an object in place of its module."""
    monkeypatch.setitem(sys.modules, NAME, found)
    return WrappedModel("m", target)


def test_a_module_is_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(predict=lambda: 1)
    assert model_of(monkeypatch, module).model is module


@pytest.mark.parametrize("target", [f"{NAME}:outer.inner", f" {NAME} : outer.inner ", f"{NAME}:outer.inner [extra]"])
def test_an_attribute_of_a_module_is_a_model(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    inner = Ordinary()
    module = SimpleNamespace(outer=SimpleNamespace(inner=inner))
    assert model_of(monkeypatch, module, target).model is inner


def test_a_class_is_instantiated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ordinary, "instances", 0)
    model = model_of(monkeypatch, SimpleNamespace(cls=Ordinary), f"{NAME}:cls")
    assert isinstance(model.model, Ordinary)
    assert model.require("predict")() is model.require("predict")()
    assert Ordinary.instances == 1


def test_a_class_with_only_static_methods_is_not_instantiated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_of(monkeypatch, SimpleNamespace(cls=Static), f"{NAME}:cls").model is Static


def test_a_class_with_at_least_one_instance_method_is_instantiated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(model_of(monkeypatch, SimpleNamespace(cls=Mixed), f"{NAME}:cls").model, Mixed)


@pytest.mark.parametrize("target", ["no.such.module", f"{NAME}:nothing"])
def test_a_missing_module_or_attribute_is_an_error(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    with pytest.raises((ImportError, AttributeError)):
        model_of(monkeypatch, SimpleNamespace(), target)


def test_a_missing_method_is_answered_with_501(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(monkeypatch, SimpleNamespace())
    with pytest.raises(Refusal) as refusal:
        model.require("predict")
    assert read_answer(refusal.value.answer)[::3] == (501, b"501: Not implemented by underlying model (loaded 'm')")


def raising(error: Exception) -> Any:
    """Make a function that raises."""

    def method() -> Any:
        raise error

    return method


@pytest.mark.parametrize("error", [NotImplementedError(), AttributeError("x")], ids=["unfinished", "attribute"])
def test_unimplemented_arguments_and_metadata_have_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    model = model_of(monkeypatch, SimpleNamespace(get_predict_args=raising(error), get_metadata=raising(error)))
    assert model.arguments("get_predict_args") == {}
    assert ("AttributeError: x" in capsys.readouterr().err) == isinstance(
        error, AttributeError
    )  # an AttributeError may be a mistake
    assert model.arguments("get_train_args") == {}
    assert metadata(model) == {
        "id": "0", "name": "m", "links": [{"rel": "self", "href": "/here"}],
        "description": "Could not load description from underlying model (loaded 'm')",
    }  # fmt: skip


def metadata(model: WrappedModel) -> Any:
    """Ask a model for its metadata."""
    return json.loads(read_answer(model.metadata("/here"))[3])


def test_the_models_metadata_overrides_the_default_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(monkeypatch, SimpleNamespace(get_metadata=lambda: {"author": "A", "id": 5, "extra": None}))
    expected = {"id": 5, "name": "m", "links": [{"rel": "self", "href": "/here"}], "author": "A", "extra": None}
    assert metadata(model) == expected
    assert list(metadata(model)) == list(expected)


@pytest.mark.parametrize("name", ["get_predict_args", "get_metadata"])
def test_other_exceptions_of_a_model_propagate(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = model_of(monkeypatch, SimpleNamespace(**{name: raising(KeyError("k"))}))
    with pytest.raises(KeyError):
        model.arguments(name) if name != "get_metadata" else model.metadata("")


def test_arguments_that_are_not_a_dict_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="not a dict"):
        model_of(monkeypatch, SimpleNamespace(get_predict_args=lambda: [1])).arguments("get_predict_args")


def test_warm_may_be_unimplemented_but_its_other_exceptions_propagate(monkeypatch: pytest.MonkeyPatch) -> None:
    model_of(monkeypatch, SimpleNamespace(warm=raising(NotImplementedError()))).warm()
    model_of(monkeypatch, SimpleNamespace()).warm()
    with pytest.raises(ValueError, match="cold"):
        model_of(monkeypatch, SimpleNamespace(warm=raising(ValueError("cold")))).warm()
