"""A component is imported, constructed and loaded as in seldon-core, and described for the server."""

# ruff: noqa: N803 - X is what seldon-core calls it

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
from seldon_core.user_model import SeldonComponent

from penstock.backends.errors import InferError
from penstock.batching.spec import ModelSpec
from penstock.server.seldon.components import SELDON
from penstock.server.seldon.inside import service as opening
from penstock.server.seldon.inside.service import SeldonInside, open_service
from penstock.server.seldon.loading import _order
from penstock.server.seldon.messages import ComponentDescription

from .component_calls import ask, ask_service, failed, inside


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules are removed from sys.modules afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def opened(folder: Path, component: str, source: str, parameters: str = "[]") -> SeldonInside:
    file = folder / f"{component.rpartition('.')[0].replace('.', '/') or component}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(source, "utf-8")
    settings = {"component": component, "folder": str(folder), "parameters": parameters, "strict": True}
    return open_service(settings, None)  # type: ignore[arg-type]


def test_a_name_selects_the_class_in_the_module_of_that_name(folder: Path) -> None:
    source = "class Named:\n    def __init__(self, n, s='x', b=False): self.made = [[n, s, b]]\n"
    source += "    def predict(self, X, names): return {'made': self.made}\n"
    parameters = [
        {"name": "n", "value": "3", "type": "INT"},
        {"name": "s", "value": "bar", "type": "STRING"},
        {"name": "b", "value": "on", "type": "BOOL"},
    ]
    service = opened(folder, "Named", source, json.dumps(parameters))
    assert ask_service(service, {"strData": ""}).body == '{"jsonData":{"made":[[3,"bar",true]]},"meta":{}}\n'


def test_a_dotted_name_selects_a_class_in_a_package(folder: Path) -> None:
    source = "class Thing:\n    def predict(self, X, names): return __name__\n"
    assert ask_service(opened(folder, "pack.mod.Thing", source), {"strData": ""}).decoded["strData"] == "pack.mod"


def test_the_components_folder_is_last_on_sys_path(folder: Path) -> None:
    opened(folder, "Last", "class Last: pass\n")
    assert sys.path[-1] == str(folder)
    assert any(path.endswith("importable") for path in sys.path)


@pytest.mark.parametrize(
    ("source", "parameters", "text"),
    [
        ("import nothing_of_the_kind\n", "[]", "ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("x = 1\n", "[]", "AttributeError: module 'Broken' has no attribute 'Broken'"),
        ("class Broken:\n    def __init__(self): raise ValueError('no model')\n", "[]", "ValueError: no model"),
        ("class Broken:\n    def load(self): raise OSError('no file')\n", "[]", "OSError: no file"),
        ("import sys\nsys.exit(3)\n", "[]", "SystemExit: 3"),
        ("class Broken: pass\n", '[{"name": "n", "value": "x", "type": "INT"}]',
         "Bad model parameter: n with value x can't be parsed as a INT"),
        ("class Broken:\n    def __init__(self): raise KeyboardInterrupt('why')\n", "[]",
         "component 'Broken' cannot be opened: KeyboardInterrupt: why"),
        ("class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute\n", "[]", "opened: Mute"),
    ],
    ids=["import", "no class", "construction", "load", "exit", "a parameter", "an interrupt", "no text"],
)  # fmt: skip
def test_an_error_while_opening_a_component_is_raised_with_its_text(
    folder: Path, source: str, parameters: str, text: str
) -> None:
    with pytest.raises(InferError) as raised:
        opened(folder, "Broken", source, parameters)
    assert raised.value.message.endswith(text)


@pytest.mark.parametrize("error", [NotImplementedError("later"), AttributeError("no weights")], ids=["none", "a bug"])
def test_a_not_implemented_or_attribute_error_in_load_is_logged_and_ignored(error: Exception, caplog: Any) -> None:
    class Loads:
        def load(self) -> None:
            raise error

        def predict(self, X: Any, names: Any) -> Any:
            return X

    with caplog.at_level(logging.WARNING, "seldon_core"):
        assert ask(Loads(), {"strData": "a"}).status == 200
    assert "load() failed" in caplog.text
    assert str(error) in caplog.text


def test_load_is_called_once_when_a_component_is_opened() -> None:
    class Loads:
        loads = 0

        def load(self) -> None:
            self.loads += 1

    user = Loads()
    inside(user)
    assert user.loads == 1


class Ident:
    def predict(self, X: Any, names: Any) -> Any:
        return X


class Sub(SeldonComponent):  # type: ignore[misc]
    pass


class Health(Ident):
    def health_status(self) -> Any:
        raise ValueError("sick")


def test_the_health_answer_is_precomputed_for_components_without_a_health_method() -> None:
    assert inside(Ident()).description.health == '{"meta":{},"strData":"healthy"}\n'
    sub = '{"meta":{},"strData":"not implemented - assuming healthy"}\n'
    assert inside(Sub()).description.health == sub
    assert inside(Health()).description.health == ""
    assert ask(Health(), b"", 6)[:2] == (500, failed("sick"))  # type: ignore[arg-type]


def test_the_description_states_whether_calls_may_share_a_batch() -> None:
    class Raw(Ident):
        def predict_raw(self, message: Any) -> Any:
            return message

    class WithMeta:
        def predict(self, X: Any, names: Any, **keywords: Any) -> Any:
            return X

    def batching_of(user: Any) -> tuple[bool, bool]:
        description = inside(user).description
        return description.batches, description.takes_meta

    assert [batching_of(Ident()), batching_of(WithMeta()), batching_of(Raw()), batching_of(object())] == [
        (True, False), (True, True), (False, False), (False, False),
    ]  # fmt: skip


def test_a_description_is_sent_with_its_metadata() -> None:
    class Described(Ident):
        def init_metadata(self) -> Any:
            return {"name": "m", "inputs": [{"messagetype": "jsonData", "schema": {"b": 1, "a": 2}}]}

    body, _ = inside(Described()).on_open()
    description = ComponentDescription.read(body)
    assert description.metadata is not None
    assert description.metadata["name"] == "m"
    assert description.page.startswith('{"custom":{},"inputs":[{"messagetype":"jsonData","schema":{"a":2,"b":1}}],')


def test_a_component_with_invalid_metadata_is_still_served() -> None:
    class Bad(Ident):
        def init_metadata(self) -> Any:
            return {"versions": "v1"}

    service = inside(Bad())
    assert (service.description.metadata, service.description.page) == (None, "")
    assert ask_service(service, {"strData": "a"}).status == 200


def test_a_custom_service_runs_in_a_separate_process(monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    class Serves(Ident):
        def custom_service(self) -> None:
            theirs.send(multiprocessing.current_process().pid)

    monkeypatch.setattr(opening, "die_with_parent", lambda parent: None)
    SeldonInside(Serves(), {})
    assert ours.poll(30)
    assert ours.recv() != multiprocessing.current_process().pid
    for child in multiprocessing.active_children():
        child.join(30)


def test_only_the_first_of_several_workers_runs_the_custom_service() -> None:
    spec = ModelSpec("m", 1, Path("/"), SELDON, options={"component": "M"})
    assert [_order(spec, "", "m", number).settings["custom_service"] for number in (1, 2, 3)] == [True, False, False]

    class Serves(Ident):
        def custom_service(self) -> None:
            raise AssertionError

    before = multiprocessing.active_children()
    SeldonInside(Serves(), {"custom_service": False})
    assert multiprocessing.active_children() == before
