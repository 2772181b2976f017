"""Changes that asking a model for its arguments makes are undone where it predicts or trains."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
from marshmallow import fields, validate

from penstock.server.deepaas.inside.service import DeepaasInside
from penstock.server.deepaas.inside.untouched import restoring_dicts
from penstock.server.deepaas.messages import TRAIN

from .worker_calls import NAME, call_of, opened, predicted, sent_json

TRAINED = "2026-01-01"


def catalogue_model() -> Any:
    """Make a model like the classifiers of the DEEP catalogue.

    Its arguments are of what was trained. What a training had saved of the configuration has no choice yet, and is
    checked as any other when it is loaded.
    """
    conf: dict[str, Any] = OrderedDict(testing={"timestamp": {"value": None, "help": "which"}})

    def get_predict_args() -> dict[str, Any]:
        timestamp = conf["testing"]["timestamp"]
        timestamp["value"] = TRAINED
        timestamp["choices"] = [TRAINED]
        return {"timestamp": fields.Str(load_default=TRAINED, validate=validate.OneOf(timestamp["choices"]))}

    def loaded(**options: Any) -> Any:
        timestamp = conf["testing"]["timestamp"]
        timestamp["value"] = None
        if "choices" in timestamp and timestamp["value"] not in timestamp["choices"]:
            raise ValueError("The selected value for timestamp is not an available choice.")
        return {"conf": timestamp, **options}

    return SimpleNamespace(
        CONF=conf, get_predict_args=get_predict_args, get_train_args=get_predict_args, predict=loaded, train=loaded
    )


def test_a_predicting_model_has_the_configuration_it_was_imported_with(monkeypatch: pytest.MonkeyPatch) -> None:
    service = opened(monkeypatch, catalogue_model())
    assert predicted(service) == {"conf": {"value": None, "help": "which"}, "timestamp": TRAINED}


def test_arguments_of_a_model_are_checked_against_the_available_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    service = opened(monkeypatch, catalogue_model())
    with pytest.raises(AssertionError, match=f"Must be one of: {TRAINED}"):
        predicted(service, sent_json({"timestamp": "1999"}))


def test_a_training_model_has_the_configuration_it_was_imported_with(monkeypatch: pytest.MonkeyPatch) -> None:
    service = opened(monkeypatch, catalogue_model(), role="train")
    output = {"conf": {"value": None, "help": "which"}, "timestamp": TRAINED}
    assert json.loads(service.call(TRAIN, 1, call_of(), [])[0]) == {"output": output}


def test_the_desk_keeps_changes_made_while_it_asks_for_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    model = catalogue_model()
    assert isinstance(opened(monkeypatch, model, role="desk"), DeepaasInside)
    assert model.CONF["testing"]["timestamp"]["choices"] == [TRAINED]


def test_dicts_of_all_modules_of_the_package_and_of_no_others_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, other = (SimpleNamespace(conf={"a": 1}) for _ in range(3))
    monkeypatch.setitem(sys.modules, NAME, one)
    monkeypatch.setitem(sys.modules, f"{NAME}.config", two)
    monkeypatch.setitem(sys.modules, f"{NAME}s", other)
    with restoring_dicts(f"{NAME}.api:model [extra]"):
        one.conf["b"] = two.conf["a"] = 2
        del other.conf["a"]
    assert (one.conf, two.conf, other.conf) == ({"a": 1}, {"a": 1}, {})


def test_entries_added_by_importing_a_submodule_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(registry={})
    monkeypatch.setitem(sys.modules, NAME, package)
    with restoring_dicts(NAME):
        monkeypatch.setitem(sys.modules, f"{NAME}.fields", SimpleNamespace())
        package.registry["fields"] = 1
    assert package.registry == {"fields": 1}


def test_entries_added_to_an_empty_dict_or_noted_by_a_flag_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(labels={}, conf={"a": 1}, ready=False)
    monkeypatch.setitem(sys.modules, NAME, package)
    with restoring_dicts(NAME):
        package.labels[0] = "cat"
        package.conf["b"] = 2
    assert (package.labels, package.conf) == ({0: "cat"}, {"a": 1})
    with restoring_dicts(NAME):
        package.conf["b"], package.ready = 2, True
    assert package.conf == {"a": 1, "b": 2}


def test_a_dict_shared_with_another_package_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = {"base": 1}
    monkeypatch.setitem(sys.modules, NAME, SimpleNamespace(registry=registry))
    monkeypatch.setitem(sys.modules, f"{NAME}s", SimpleNamespace(known=registry))
    with restoring_dicts(NAME):
        registry["net"] = 2
    assert registry == {"base": 1, "net": 2}
