"""What `import deepaas` provides if the original is not installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.server.deepaas.inside.model import WrappedModel
from penstock.server.deepaas.inside.service import IMPORTABLE

from .worker_calls import NAME


@pytest.fixture
def shim(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the bundled package importable, and remove it from sys.modules afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path, IMPORTABLE])
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepaas"}
    for name in before:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "deepaas"]:
        del sys.modules[name]
    sys.modules.update(before)


def imported(name: str) -> Any:
    """Import a module."""
    return importlib.import_module(name)


def test_the_bundled_package_has_what_models_import(shim: None) -> None:
    assert imported("deepaas").__version__
    assert imported("deepaas.model.v2").wrapper is imported("deepaas.model.v2.wrapper")
    assert imported("deepaas.model.v2").base is imported("deepaas.model.v2.base")
    uploaded = imported("deepaas.model.v2.wrapper").UploadedFile
    assert uploaded._fields == ("name", "filename", "content_type", "original_filename")
    assert uploaded() == (None, None, None, None)
    assert uploaded("a", filename="b").filename == "b"


def test_the_base_model_has_all_methods_as_abstract_methods(shim: None) -> None:
    base = imported("deepaas.model.v2.base").BaseModel
    assert base.schema is None
    with pytest.raises(TypeError):
        base()
    methods = {name: lambda self, **_: None for name in base.__abstractmethods__}
    assert sorted(methods) == ["get_metadata", "get_predict_args", "get_train_args", "predict", "train", "warm"]
    assert type("Whole", (base,), methods)().warm() is None


def test_abstract_methods_of_the_base_model_raise_not_implemented_error(shim: None) -> None:
    base = imported("deepaas.model.v2.base").BaseModel
    for name in sorted(base.__abstractmethods__):
        with pytest.raises(NotImplementedError):
            getattr(base, name)(None)


def test_a_subclass_with_only_static_methods_is_not_instantiated(shim: None, monkeypatch: pytest.MonkeyPatch) -> None:
    base = imported("deepaas.model.v2.base").BaseModel
    static = type("Static", (base,), {"predict": staticmethod(lambda: "static")})
    monkeypatch.setitem(sys.modules, NAME, static)
    model = WrappedModel("m", NAME)
    assert model.require("predict")() == "static"
    assert model.method("train") is None
