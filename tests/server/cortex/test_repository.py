from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from penstock.batching.spec import HookSpec, ModelSpec
from penstock.server.cortex.models import ModelFinder
from penstock.server.cortex.repository import CortexRepository
from penstock.server.repository.control import ModelControl
from penstock.server.repository.control_options import ControlOptions
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.gpus import Gpus
from penstock.server.repository.scan import ModelEntry
from tests.cortex.projects import Project
from tests.server.repository.folders import FakeEngine, look_twice

HANDLER = "def post_inference(prediction, signature, metadata):\n    return 1\n"
STATEFUL = (
    "def pre_inference(sample, signature, metadata):\n    global seen\n    seen = sample\n    return sample\n\n\n"
    + HANDLER
)


@pytest.fixture
def models() -> Iterator[ModelFinder]:
    finder = ModelFinder()
    yield finder
    finder.close()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project with one API, whose model is an empty file."""
    iris = Project(tmp_path / "iris")
    iris.model("m.onnx").touch()
    iris.api("classifier", "models/m.onnx", HANDLER)
    return iris


def repository(models: ModelFinder, *projects: Project, **defaults: Any) -> CortexRepository:
    return CortexRepository([each.folder for each in projects], Defaults(**defaults), models)


def test_a_scan_is_consistent_while_another_thread_rereads_the_project(models: ModelFinder, project: Project) -> None:
    found = repository(models, project)
    stamp = models.stamp

    def change(api: Any) -> str:
        models.stamp = stamp  # type: ignore[method-assign]
        project.api("another", "models/m.onnx")
        assert "another" in found.names()  # as a load in another thread asks
        return stamp(api)

    models.stamp = change  # type: ignore[method-assign]
    entries, _, prints = found.scan()

    assert [entry.name for entry in entries] == [*prints] == ["classifier"]


def spec_of(entry: ModelEntry | None) -> ModelSpec:
    assert entry is not None
    assert [finding for finding in entry.findings if finding.is_mistake] == []
    (spec,) = entry.specs
    return spec


def hooks_of(spec: ModelSpec) -> HookSpec:
    assert spec.hooks is not None
    return spec.hooks


def finding_texts(entry: ModelEntry | None) -> list[str]:
    assert entry is not None
    return [str(finding).replace(f"{finding.path.parent}/", "") for finding in entry.findings]


class TestApiSpecs:
    def test_an_api_is_a_model_of_the_same_name(self, project: Project, models: ModelFinder) -> None:
        (entry,), stray, prints = repository(models, project).scan()

        spec = spec_of(entry)
        assert (spec.name, spec.version, spec.backend) == ("classifier", 1, "onnxruntime")
        assert spec.path == project.folder / "models/m.onnx"
        assert spec.frees_rows
        assert (stray, set(prints)) == ([], {"classifier"})

    def test_a_handler_is_configured_as_hooks_of_the_cortex_dialect(
        self, project: Project, models: ModelFinder
    ) -> None:
        hooks = hooks_of(spec_of(repository(models, project).read("classifier")[0]))

        assert (hooks.path, hooks.dialect) == (project.folder / "handler.py", "cortex")
        assert hooks.roots == (project.folder,)
        assert hooks.mounts == {"/mnt/project": str(project.folder)}
        assert hooks.dialect_settings == {
            "kind": "onnx", "handler": "handler.py", "relaxed_shapes": False, "tracker": None,
            "project": str(project.folder),
        }  # fmt: skip
        assert (hooks.replicas, hooks.timeout_s) == (None, 600.0)

    def test_an_api_without_a_handler_has_only_the_cortex_dialect(self, project: Project, models: ModelFinder) -> None:
        project.api("bare", "models/m.onnx")

        hooks = hooks_of(spec_of(repository(models, project).read("bare")[0]))

        assert not hooks.has_file
        assert (hooks.dialect, hooks.dialect_settings["kind"]) == ("cortex", "onnx")

    def test_metadata_and_python_path_are_passed_to_the_handler(self, project: Project, models: ModelFinder) -> None:
        project.api("b", "models/m.onnx", HANDLER, _metadata={"labels": ["x"]}, _python_path="lib")
        project.file("lib/inner.py", "")

        hooks = hooks_of(spec_of(repository(models, project).read("b")[0]))

        assert hooks.metadata == {"labels": ["x"]}
        assert set(hooks.roots) == {project.folder, project.folder / "lib"}

    @pytest.mark.parametrize(("handler", "replicas"), [(STATEFUL, 2), (HANDLER, None)])
    def test_max_replicas_limits_the_replicas_of_stateful_handlers(
        self, handler: str, replicas: int | None, project: Project, models: ModelFinder
    ) -> None:
        project.api("b", "models/m.onnx", handler, compute={"max_replicas": 2})

        assert hooks_of(spec_of(repository(models, project).read("b")[0])).replicas == replicas

    def test_a_tensorflow_api_has_the_version_of_its_folder_and_its_options(
        self, project: Project, models: ModelFinder
    ) -> None:
        for name in ("saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001"):
            project.file(f"export/1560263597/{name}", "")
        project.api("t", "export", kind="tensorflow")
        project.api("u", "export", kind="tensorflow", _signature_key="predict")
        found = repository(models, project, tensorflow_rows=7, tensorflow_options={"allow_growth": "0"})

        unkeyed, keyed = spec_of(found.read("t")[0]), spec_of(found.read("u")[0])

        assert (unkeyed.version, unkeyed.backend) == (1560263597, "tensorflow")
        assert unkeyed.path == project.folder / "export/1560263597"
        assert unkeyed.options == {"allow_growth": "0", "cortex_signature": "1", "worker.name": unkeyed.name}
        assert keyed.options == {"allow_growth": "0", "TF_SIGNATURE_DEF": "predict", "worker.name": keyed.name}
        assert unkeyed.policy.default_max_batch_rows == 7
        assert unkeyed.frees_rows

    @pytest.mark.parametrize(("gpus", "device"), [((0, 1), "cuda:0"), ((1,), "cuda:1"), (None, "cuda:0")])
    def test_an_api_that_requests_a_gpu_is_placed_on_the_first_allowed_gpu(
        self, project: Project, models: ModelFinder, gpus: tuple[int, ...] | None, device: str
    ) -> None:
        project.api("g", "models/m.onnx", compute={"gpu": 1})

        entry = repository(models, project, gpus=Gpus.from_numbers(gpus)).read("g")[0]

        assert finding_texts(entry) == []
        assert spec_of(entry).instances[0].devices == (device,)
        assert spec_of(entry).options["penstock.cpu_fallback"] == "1"

    def test_an_api_that_requests_a_gpu_is_served_on_the_cpu_if_there_is_no_gpu(
        self, project: Project, models: ModelFinder
    ) -> None:
        project.api("g", "models/m.onnx", compute={"gpu": 1})

        entry = repository(models, project, gpus=Gpus.from_numbers(())).read("g")[0]

        assert spec_of(entry).instances[0].devices == ("cpu",)
        assert spec_of(entry).fallback_reason == "device 'cuda:0' does not exist: there is no GPU"
        assert finding_texts(entry) == [
            f"cortex.yaml:12: warning: api: g: compute: gpu: is served on the CPU: {spec_of(entry).fallback_reason}"
        ]


@pytest.mark.parametrize(
    ("handler", "warned"),
    [
        ("class ONNXPredictor:\n    pass\n", True),
        ("def preinference(sample, metadata): pass\n", True),
        ("from other import post_inference\n", False),
        ("from other import *\n", False),
    ],
)
def test_a_handler_without_hooks_is_served_with_a_warning(
    handler: str, warned: bool, project: Project, models: ModelFinder
) -> None:
    project.api("a", "models/m.onnx", handler)

    entry, _ = repository(models, project).read("a")

    text = "api: a: onnx: request_handler: a.py: has neither pre_inference nor post_inference, and does nothing"
    assert [each.partition(" ")[2] for each in finding_texts(entry)] == [f"warning: {text}"] * warned
    assert hooks_of(spec_of(entry)).path == project.folder / "a.py"


class TestMissingFiles:
    @pytest.mark.parametrize(
        ("api", "message"),
        [
            ({"model": "x.onnx"}, "model: x.onnx: not found or insufficient permissions"),
            ({"_request_handler": "x.py"}, "request_handler: x.py: implementation file does not exist"),
            ({"_request_handler": "../x.py"}, "request_handler: ../x.py: implementation file does not exist"),
            ({"_request_handler": "/etc/passwd"}, "request_handler: /etc/passwd: implementation file does not exist"),
        ],
    )
    def test_a_missing_file_prevents_only_its_own_api_from_being_served(
        self, api: dict[str, Any], message: str, project: Project, models: ModelFinder
    ) -> None:
        project.api("broken", **({"model": "models/m.onnx"} | api))

        (broken, good), _, _ = repository(models, project).scan()

        assert broken.specs == ()
        assert [text.partition(" ")[2] for text in finding_texts(broken)] == [f"api: broken: onnx: {message}"]
        assert good.specs

    def test_a_missing_file_is_reported_with_its_line(self, project: Project, models: ModelFinder) -> None:
        project.api("broken", "models/m.onnx", _request_handler="x.py")
        lines = (project.folder / "cortex.yaml").read_text("utf-8").splitlines()

        entry, _ = repository(models, project).read("broken")

        assert entry is not None
        assert lines[entry.findings[0].line - 1] == "    request_handler: x.py"

    def test_a_missing_model_of_a_cortex_0_9_api_is_reported_without_the_onnx_key(
        self, project: Project, models: ModelFinder
    ) -> None:
        project.api("broken", "x.onnx", old=True)

        texts = finding_texts(repository(models, project).read("broken")[0])

        assert [text.partition(" ")[2] for text in texts] == [
            "api: broken: model: x.onnx: not found or insufficient permissions"
        ]

    def test_a_missing_python_path_folder_is_reported(self, project: Project, models: ModelFinder) -> None:
        project.api("broken", "models/m.onnx", HANDLER, _python_path="lib")

        (text,) = finding_texts(repository(models, project).read("broken")[0])

        assert "api: broken: onnx: python_path: " in text

    def test_reading_an_unknown_api_returns_no_entry(self, project: Project, models: ModelFinder) -> None:
        assert repository(models, project).read("other") == (None, b"")


class TestSeveralProjects:
    def test_the_apis_of_several_projects_are_combined(
        self, project: Project, models: ModelFinder, tmp_path: Path
    ) -> None:
        other = Project(tmp_path / "other", "second")
        other.model("n.onnx").touch()
        other.api("b", "models/n.onnx")
        found = repository(models, project, other)

        names = [entry.name for entry in found.scan()[0]]

        assert names == found.names() == ["b", "classifier"]
        assert {name: api.endpoint for name, api in found.apis.items()} == {
            "b": "/second/b", "classifier": "/iris/classifier",
        }  # fmt: skip

    def test_an_api_name_in_two_projects_is_reported_for_both(
        self, project: Project, models: ModelFinder, tmp_path: Path
    ) -> None:
        other = Project(tmp_path / "other", "second")
        other.api("classifier", "m.onnx")
        found = repository(models, project, other)

        (entry,), _, _ = found.scan()

        assert entry.specs == ()
        text = 'name "classifier" must be unique across apis (defined in iris/cortex.yaml and other/cortex.yaml)'
        assert {finding.message for finding in entry.findings} == {f"api: classifier: {text}"}
        assert {finding.path.parent for finding in entry.findings} == {project.folder, other.folder}
        assert found.names() == ["classifier", "classifier"]

    def test_an_endpoint_of_another_project_is_reported(
        self, project: Project, models: ModelFinder, tmp_path: Path
    ) -> None:
        other = Project(tmp_path / "other", "second")
        other.api("b", "m.onnx", endpoint="/iris/classifier")

        rejected, accepted = repository(models, project, other).scan()[0]

        assert finding_texts(rejected) == [
            'cortex.yaml:3: api: b: endpoint is already in use by an API named "classifier" in the "iris" deployment'
        ]
        assert accepted.specs


class TestChanges:
    @pytest.mark.parametrize("file", ["handler.py", "models/m.onnx", "encoder.py", "config.json"])
    def test_a_change_to_any_file_of_the_project_changes_the_fingerprint(
        self, file: str, project: Project, models: ModelFinder
    ) -> None:
        found = repository(models, project)
        before = found.fingerprints()

        project.file(file, "changed = 1\n")

        after = found.fingerprints()
        assert after["classifier"] != before["classifier"]
        assert after["classifier"] == found.read("classifier")[1] == found.fingerprint("classifier")

    def test_a_change_to_a_model_outside_the_project_changes_the_fingerprint(
        self, project: Project, models: ModelFinder, tmp_path: Path
    ) -> None:
        (tmp_path / "far.onnx").touch()
        project.api("far", str(tmp_path / "far.onnx"))
        found = repository(models, project)
        before = found.fingerprints()

        (tmp_path / "far.onnx").write_text("x", "utf-8")

        assert {name for name, print_ in found.fingerprints().items() if before[name] != print_} == {"far"}

    def test_a_mistake_in_a_changed_project_is_logged_once_and_the_old_apis_are_kept(
        self, project: Project, models: ModelFinder, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = repository(models, project)
        found.scan()
        file = project.folder / "cortex.yaml"
        good = file.read_text("utf-8")
        apis = found.apis
        file.write_text(good + "  nonsense: 1\n", "utf-8")

        with caplog.at_level(logging.WARNING, "penstock"):
            prints = [found.fingerprints() for _ in range(3)]

        assert [record.getMessage() for record in caplog.records] == [
            f'{file}:8: api: classifier: key "nonsense" is not supported'
        ]
        assert found.apis is apis
        assert prints[0].keys() == {"classifier"}
        assert spec_of(found.read("classifier")[0]).name == "classifier"

    def test_an_api_added_to_the_project_is_found(self, project: Project, models: ModelFinder) -> None:
        found = repository(models, project)
        found.scan()
        before = found.apis
        assert found.fingerprints()
        assert found.apis is before

        project.api("b", "models/m.onnx", endpoint="/b")

        assert set(found.fingerprints()) == {"classifier", "b"}
        assert found.apis["b"].endpoint == "/b"

    def test_an_api_added_to_the_project_is_loaded_in_poll_mode(self, project: Project, models: ModelFinder) -> None:
        async def run() -> None:
            engine, found = FakeEngine(), repository(models, project)
            control = ModelControl(found, engine, ControlOptions("poll", poll_interval_s=3600))
            assert await control.start() == []
            assert set(engine.served) == {"classifier"}

            project.api("b", "models/m.onnx")
            await look_twice(control)

            assert set(engine.served) == {"classifier", "b"}
            await control.stop()

        asyncio.run(run())


class TestStore:
    def test_a_model_in_a_store_is_fetched_on_load_and_again_after_a_change(
        self, project: Project, models: ModelFinder
    ) -> None:
        store = fsspec.filesystem("memory")
        store.pipe("/bucket/far.onnx", b"1")
        project.api("far", "memory://bucket/far.onnx")
        found = repository(models, project)
        try:
            first, before = found.read("far")
            again, same = found.read("far")
            store.pipe("/bucket/far.onnx", b"2")
            changed, after = found.read("far")
        finally:
            store.store.clear()

        assert spec_of(first).path == spec_of(again).path
        assert before == same != after
        assert [spec_of(entry).path.read_bytes() for entry in (first, changed)] == [b"1", b"2"]


class TestControl:
    def test_an_api_is_loaded_by_its_name_in_explicit_mode(self, project: Project, models: ModelFinder) -> None:
        async def run() -> None:
            project.api("b", "models/m.onnx")
            engine, found = FakeEngine(), repository(models, project)
            control = ModelControl(found, engine, ControlOptions("explicit", startup_models=("b",)))
            await control.start()
            assert set(engine.served) == {"b"}
            await control.load("classifier")
            assert set(engine.served) == {"classifier", "b"}
            await control.stop()

        asyncio.run(run())

    def test_a_configuration_in_a_load_request_is_rejected(self, project: Project, models: ModelFinder) -> None:
        entry, _ = repository(models, project).read("classifier", config=object())

        assert finding_texts(entry) == ["cortex.yaml:3: takes no configuration: it is in the project"]

    def test_apis_that_cannot_be_loaded_are_listed(self, project: Project, models: ModelFinder) -> None:
        project.api("broken", "x.onnx")
        found = repository(models, project)
        found.scan()

        assert set(found.apis) == {"classifier", "broken"}
        assert replace(found.apis["broken"], line=0).model == "x.onnx"
