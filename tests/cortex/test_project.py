"""Live projects: their files, debug output, logs and requirements, and the mistakes that prevent serving."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.server.environments.environments import REQUIRED_MODULES
from penstock.server.listening.sockets import StartError
from tests.cortex.projects import FLOWER, SAMPLE, Project, ask, post, write_iris
from tests.live import Live, live_server
from tests.server.environments.fake_pythons import repack, write_wheel
from tests.server.repository.folders import look_twice

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path: Path) -> Project:
    new_project = Project(tmp_path / "project")
    write_iris(new_project.model("m.onnx"))
    return new_project


def served(project: Project, **settings: Any) -> Any:
    """Serve a project."""
    return live_server(project.folder, dialect="cortex", **settings)


def answer(live: Live, api: str = "one", value: Any = FLOWER) -> Any:
    """Give the answer of an API, which must succeed."""
    found = post(live.http_port, f"/iris/{api}", value)
    assert found.status == 200, found.body
    return found.json


def why_not(project: Project, **settings: Any) -> str:
    """Give the reason why a project is not served."""
    with pytest.raises(StartError) as raised, served(project, **settings):
        pass
    return str(raised.value)


class TestFiles:
    def test_project_files_are_found_at_mnt_project_and_by_import(self, project: Project) -> None:
        project.file("config.json", '{"word": "config"}')
        project.file("words.py", "word = 'module'")
        project.file("package/deep/inner.py", "word = 'path'")
        project.file("data/notes.txt", "data")
        handler = """
            import glob, json, os, pathlib
            import inner
            from words import word

            with open("/mnt/project/config.json") as file:
                config = json.load(file)["word"]

            def post_inference(prediction, signature, metadata):
                return {
                    "words": [config, word, inner.word, pathlib.Path("/mnt/project/data/notes.txt").read_text()],
                    "found": glob.glob("/mnt/project/data/*.txt"),
                    "there": os.path.exists("/mnt/project/nothing"),
                }
            """
        project.api("one", "models/m.onnx", handler, path="handlers/deep.py", _python_path="package/deep")
        with served(project) as live:
            assert answer(live) == {
                "words": ["config", "module", "path", "data"], "found": ["/mnt/project/data/notes.txt"], "there": False,
            }  # fmt: skip

    def test_the_handler_is_loaded_before_the_first_request(self, project: Project) -> None:
        handler = """
            import time

            loaded_s = time.monotonic()

            def post_inference(prediction, signature, metadata):
                return loaded_s
            """
        project.api("one", "models/m.onnx", handler)
        with served(project) as live:
            ready_s = time.monotonic()
            first, second = answer(live), answer(live)

        assert first == second < ready_s

    @pytest.mark.parametrize("model", ["s3://bucket/iris/m.onnx", "models/m.onnx", "{folder}/models/m.onnx"])
    def test_a_model_can_be_named_by_s3_address_relative_path_or_absolute_path(
        self, project: Project, tmp_path: Path, model: str
    ) -> None:
        write_iris(_make_folder(tmp_path / "s3" / "bucket" / "iris") / "m.onnx")
        project.api("one", model.format(folder=project.folder))
        with served(project, s3_root=str(tmp_path / "s3")) as live:
            assert answer(live)[0] == [0]

    def test_a_handler_can_be_a_pickle_of_functions(self, project: Project) -> None:
        dill = pytest.importorskip("dill")

        def post_inference(prediction: Any, signature: Any, metadata: Any) -> Any:
            return "from a pickle"

        (project.folder / "handler.pickle").write_bytes(dill.dumps({"post_inference": post_inference}, recurse=True))
        project.api("one", "models/m.onnx", _request_handler="handler.pickle")
        with served(project) as live:
            assert answer(live) == "from a pickle"


def _make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


class TestDebug:
    @pytest.mark.parametrize("query", ["?debug=true", "?debug=TRUE", "?a=b&debug=True"])
    def test_a_debug_request_logs_the_values_and_has_the_same_answer(
        self, project: Project, caplog: pytest.LogCaptureFixture, query: str
    ) -> None:
        handler = """
            def pre_inference(sample, signature, metadata):
                return list(sample.values())

            def post_inference(prediction, signature, metadata):
                return ["the label is", int(prediction[0][0])]
            """
        project.api("one", "models/m.onnx", handler)
        with served(project) as live:
            undebugged = post(live.http_port, "/iris/one", SAMPLE)
            with caplog.at_level(logging.INFO):
                debugged = post(live.http_port, f"/iris/one{query}", SAMPLE)

        logged = "\n".join(record.getMessage() for record in caplog.records)
        assert debugged.body == undebugged.body
        for word in ("sample", "pre_inference", "inference", "post_inference"):
            assert re.search(rf"(?m)^{word}: ", logged), (word, logged)
        assert "the label is" in logged


class TestLog:
    def test_each_answer_has_an_access_log_line_and_handlers_print_to_stdout(
        self, project: Project, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
    ) -> None:
        handler = """
            print("labels are loaded")

            def post_inference(prediction, signature, metadata):
                print("a prediction", flush=True)
                return None
            """
        project.api("one", "models/m.onnx", handler)
        with served(project, access_log=True) as live, caplog.at_level(logging.INFO):
            answer(live)
            post(live.http_port, "/iris/one", [1])

        lines = [record.getMessage() for record in caplog.records if record.name == "penstock.access"]
        assert [line.partition('"')[2] for line in lines] == [
            'POST /iris/one HTTP/1.1" 200', 'POST /iris/one HTTP/1.1" 406',
        ]  # fmt: skip
        printed = capfd.readouterr().out
        assert "labels are loaded" in printed
        assert printed.count("a prediction") == 1


class TestRequirements:
    def test_requirements_are_installed_before_the_start(
        self, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wheels = tmp_path / "wheels"
        write_wheel(wheels, "tiny", "1.0", "VALUE = 'installed'\n")
        for name in REQUIRED_MODULES:
            repack(wheels, name)
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_NO_COMPILE", "1")  # only a small part of numpy is imported here
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
        project.file("requirements.txt", "tiny==1.0  # from a file, not from the network")
        handler = """
            import tiny

            def post_inference(prediction, signature, metadata):
                return [tiny.VALUE, signature[0].name]
            """
        project.api("one", "models/m.onnx", handler)
        with served(project, environments=str(tmp_path / "kept")) as live:
            assert answer(live) == ["installed", "label"]

    def test_requirements_that_cannot_be_installed_prevent_the_project_from_being_served(
        self, project: Project, tmp_path: Path
    ) -> None:
        project.file("requirements.txt", "nothing-of-the-kind==1.0")
        project.api("one", "models/m.onnx", "def post_inference(prediction, signature, metadata): return 1")

        assert "--offline forbids downloads" in why_not(project, environments=str(tmp_path / "kept"), offline=True)


class TestStart:
    @pytest.mark.parametrize(
        ("source", "found"),
        [
            ("def pre_inference(p, signature, metadata): pass", "(p, signature, metadata)"),
            ("def pre_inference(sample): pass", "(sample)"),
            ("def post_inference(sample, metadata): pass", "(sample, metadata)"),
        ],
    )
    def test_c30_handlers_with_unexpected_arguments_are_rejected(
        self, project: Project, source: str, found: str
    ) -> None:
        project.api("one", "models/m.onnx", source)
        text = why_not(project)

        assert "expected function arguments arguments" in text
        assert f"but found {found}" in text

    def test_c30_handlers_of_both_generations_are_accepted(self, project: Project) -> None:
        source = """
            def pre_inference(sample, metadata):
                return sample

            def post_inference(prediction, signature, metadata):
                return [signature[0].name, metadata]
            """
        project.api("one", "models/m.onnx", source)
        with served(project) as live:
            assert answer(live) == ["label", {}]

    @pytest.mark.parametrize(
        ("source", "words"),
        [("import nothing_of_the_kind", "nothing_of_the_kind"), ("def (", "handler.py"), ("1 / 0", "division")],
    )
    def test_a_handler_that_cannot_be_loaded_prevents_its_api_from_being_served(
        self, project: Project, source: str, words: str
    ) -> None:
        project.api("one", "models/m.onnx", source)

        assert words in why_not(project)

    def test_an_invalid_model_prevents_only_its_own_api_from_being_served(self, project: Project) -> None:
        project.model("bad.onnx").write_bytes(b"nonsense")
        project.api("one", "models/m.onnx")
        project.api("bad", "models/bad.onnx")
        with served(project) as live:
            assert answer(live)[0] == [0]
            refused = post(live.http_port, "/iris/bad", FLOWER)
            assert (refused.status, refused.headers["content-type"]) == (503, "text/html; charset=utf-8")
            assert ask(live.http_port, "GET", "/healthz").status == 503

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"kind": "job", "name": "x"}, "unknown kind"),
            ({"kind": "deployment", "name": "again"}, "deployment"),
            ({"kind": "api", "name": "one", "onnx": {"model": "models/m.onnx"}}, "must be unique"),
            ({"kind": "api", "name": "Two", "onnx": {"model": "models/m.onnx"}}, "lower case"),
            ({"kind": "api", "name": "two", "endpoint": "/iris/one", "onnx": {"model": "m"}}, "endpoint"),
            ({"kind": "api", "name": "two"}, "onnx"),
            ({"kind": "api", "name": "two", "onnx": {"model": "m"}, "compute": {"min_replicas": 3, "max_replicas": 2}},
             "replicas"),
        ],
    )  # fmt: skip
    def test_mistakes_in_a_project_fail_the_start(self, project: Project, change: dict[str, Any], words: str) -> None:
        project.api("one", "models/m.onnx")
        project.resources.append(change)
        project.write()

        assert words in why_not(project)

    def test_a_missing_handler_file_is_reported(self, project: Project) -> None:
        project.api("one", "models/m.onnx", _request_handler="nothing.py")

        assert "nothing.py: implementation file does not exist" in why_not(project)


def test_an_api_is_reached_over_v2_as_the_model_of_its_name(project: Project) -> None:
    project.api("one", "models/m.onnx")
    with served(project) as live, httpx.Client(base_url=live.url) as client:
        assert client.get("/v2/health/ready").status_code == 200
        assert client.get("/v2/models/one").json()["inputs"][0]["name"] == "input"
        assert client.get("/docs").status_code == 200
        tensor = {"name": "input", "datatype": "FP32", "shape": [1, 4], "data": FLOWER}
        found = client.post("/v2/models/one/infer", json={"inputs": [tensor]}).json()
        assert found["outputs"][0]["data"] == [0]


class TestChanges:
    def test_a_changed_project_is_reloaded_and_a_project_with_mistakes_is_not(self, project: Project) -> None:
        project.api("one", "models/m.onnx", "def post_inference(prediction, metadata): return 1")
        with served(project, model_control_mode="poll", repository_poll_secs=3600) as live:
            port = live.http_port
            assert post(port, "/predict", FLOWER).json == 1

            project.file("handler.py", "def post_inference(prediction, metadata): return 2")
            live.call(look_twice(live.server.control))
            assert post(port, "/iris/one", FLOWER).json == 2

            project.resources[1] |= {"endpoint": "/new", "tracker": {"model_type": "classification"}}
            project.api("two", "models/m.onnx")
            live.call(look_twice(live.server.control))
            assert post(port, "/new", FLOWER).json == 2
            assert answer(live, "two")[0] == [0]
            assert [post(port, path, FLOWER).status for path in ("/iris/one", "/predict")] == [500, 500]
            assert 'Class="2"' in httpx.get(f"{live.url}/metrics").text

            project.resources.append({"kind": "mistake"})
            project.write()
            live.call(look_twice(live.server.control))
            assert post(port, "/new", FLOWER).json == 2

            del project.resources[1], project.resources[-1]
            project.write()
            live.call(look_twice(live.server.control))
            assert post(port, "/new", FLOWER).status == 500
            assert post(port, "/predict", FLOWER).json[0] == [0]

    def test_the_previous_handler_keeps_serving_when_the_new_one_is_invalid(self, project: Project) -> None:
        project.api("one", "models/m.onnx", "def post_inference(prediction, metadata): return 1")
        with served(project, model_control_mode="poll", repository_poll_secs=3600) as live:
            project.file("handler.py", "def post_inference(prediction, nonsense): return 2")
            live.call(look_twice(live.server.control))

            assert answer(live) == 1
            assert ask(live.http_port, "GET", "/healthz").status == 200
