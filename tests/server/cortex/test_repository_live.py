"""Projects served and checked from the command line: which start, which do not, and what is printed."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from penstock.server import cli
from penstock.server.listening.sockets import StartError
from penstock.server.settings import SettingError, Settings
from tests.cortex.projects import FLOWER, SAMPLE, Project, post, write_iris
from tests.forking import Forker
from tests.live import live_server

HANDLER = """
labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]


def pre_inference(sample, signature, metadata):
    return {signature[0].name: [sample[name] for name in metadata["columns"]]}


def post_inference(prediction, signature, metadata):
    return labels[prediction[0][0]]
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    iris = Project(tmp_path / "iris")
    write_iris(iris.model("iris.onnx"), None)
    iris.api("classifier", "models/iris.onnx", HANDLER, _metadata={"columns": list(SAMPLE)})
    return iris


def write_broken(project: Project) -> None:
    project.model("broken.onnx").write_text("no graph", "utf-8")
    project.api("broken", "models/broken.onnx")


def index(url: str) -> dict[str, str]:
    request = urllib.request.Request(f"{url}/v2/repository/index", b"", method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return {row["name"]: row["state"] + row.get("reason", "") for row in json.load(answer)}


class TestServing:
    def test_an_api_is_served_at_its_endpoint_and_as_a_model(self, project: Project) -> None:
        with live_server(project.folder, dialect="cortex") as live:
            assert post(live.http_port, "/iris/classifier", SAMPLE).triple[:2] == (200, b'"iris-setosa"\n')
            assert index(live.url) == {"classifier": "READY"}

    def test_a_project_can_be_served_by_the_path_of_its_file(self, project: Project) -> None:
        with live_server(project.folder / "cortex.yaml", dialect="cortex") as live:
            assert post(live.http_port, "/iris/classifier", SAMPLE).status == 200

    def test_a_project_that_is_given_twice_is_served_once(self, project: Project) -> None:
        with live_server(project.folder, project.folder / "cortex.yaml", dialect="cortex") as live:
            assert post(live.http_port, "/iris/classifier", SAMPLE).status == 200

    def test_an_api_that_fails_to_load_does_not_affect_the_other_apis(self, project: Project) -> None:
        write_broken(project)
        project.api("lost", "s3://bucket/lost.onnx")
        project.api("wrong", "models/iris.onnx", "def pre_inference(sample):\n    return sample\n")

        with live_server(project.folder, dialect="cortex", s3_root=str(project.folder)) as live:
            assert post(live.http_port, "/iris/classifier", SAMPLE).status == 200
            assert post(live.http_port, "/iris/broken", FLOWER).status == 503
            states = index(live.url)

        assert states["classifier"] == "READY"
        assert {name for name, state in states.items() if state.startswith("UNAVAILABLE")} == {
            "broken",
            "lost",
            "wrong",
        }
        assert "api: lost: onnx: model: s3://bucket/lost.onnx: not found or insufficient permissions" in states["lost"]
        assert "function pre_inference: expected function arguments" in states["wrong"]
        assert str(project.folder) not in states["lost"]

    def test_a_model_on_s3_is_served_from_the_s3_root(self, project: Project, tmp_path: Path) -> None:
        (tmp_path / "s3/bucket").mkdir(parents=True)
        write_iris(tmp_path / "s3/bucket/iris.onnx", None)
        project.api("far", "s3://bucket/iris.onnx")

        with live_server(project.folder, dialect="cortex", s3_root=str(tmp_path / "s3")) as live:
            assert post(live.http_port, "/iris/far", FLOWER).status == 200

    def test_several_projects_are_served_together(self, project: Project, tmp_path: Path) -> None:
        other = Project(tmp_path / "other", "second")
        write_iris(other.model("iris.onnx"), None)
        other.api("bare", "models/iris.onnx", old=True)

        with live_server(project.folder, other.folder, dialect="cortex") as live:
            assert post(live.http_port, "/iris/classifier", SAMPLE).status == 200
            assert post(live.http_port, "/second/bare", FLOWER).status == 200

    def test_predictions_are_counted_on_the_metrics_page(self, project: Project) -> None:
        with live_server(project.folder, dialect="cortex") as live:
            post(live.http_port, "/iris/classifier", SAMPLE)
            with urllib.request.urlopen(f"http://127.0.0.1:{live.metrics_port}/metrics", timeout=30) as answer:
                page = answer.read().decode()

        assert 'cortex_status_code_total{AppName="iris",APIName="classifier"' in page


class TestStarting:
    def test_mistakes_in_any_project_fail_the_start_and_are_all_reported(
        self, project: Project, tmp_path: Path
    ) -> None:
        other = Project(tmp_path / "other")
        other.api("b", "m.onnx", nonsense=1)
        project.api("c", "m.onnx", endpoint="//", compute={"cpu": "x"})

        with pytest.raises(StartError) as caught, live_server(project.folder, other.folder, dialect="cortex"):
            pass

        assert [line.partition(": ")[0] for line in str(caught.value).splitlines()] == [
            f"{project.folder}/cortex.yaml:18", f"{project.folder}/cortex.yaml:20", f"{other.folder}/cortex.yaml:7",
        ]  # fmt: skip

    def test_the_start_fails_when_no_api_can_be_served(self, tmp_path: Path) -> None:
        project = Project(tmp_path / "p")
        write_broken(project)

        with (
            pytest.raises(StartError, match="no API can be served:\nmodel 'broken' version 1: "),
            live_server(project.folder, dialect="cortex"),
        ):
            pass

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("nothing", "nothing: no such file or folder"),
            ("iris/models", "iris/models: not a Cortex project: it has no cortex.yaml"),
            ("s3://bucket/project", "a Cortex project must be a local folder"),
        ],
    )
    def test_a_path_that_is_not_a_project_fails_the_start(
        self, path: str, message: str, project: Project, tmp_path: Path
    ) -> None:
        address = path if "://" in path else str(tmp_path / path)

        with pytest.raises(StartError, match=message), live_server(address, dialect="cortex"):  # type: ignore[arg-type]
            pass

    def test_serving_a_project_without_its_dialect_suggests_the_dialect(self, project: Project) -> None:
        with (
            pytest.raises(StartError, match="is a Cortex project: serve it with --dialect cortex"),
            live_server(project.folder),
        ):
            pass

    def test_checking_a_project_without_its_dialect_suggests_the_dialect(
        self, project: Project, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["check", str(project.folder)]) == 1
        assert "iris: is a Cortex project: serve it with --dialect cortex\n" in capsys.readouterr().out

    def test_http_workers_are_rejected_for_cortex_projects(self) -> None:
        with pytest.raises(SettingError, match="Cortex projects are served by one process"):
            Settings(dialect="cortex", http_workers=2)

    @pytest.mark.slow
    def test_the_process_logs_all_mistakes_and_exits_with_status_1(self, project: Project, forker: Forker) -> None:
        project.api("c", "m.onnx", nonsense=1, sense=2)

        ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
        command = [sys.executable, "-m", "penstock.server.cli", "serve", "--dialect", "cortex"]
        ended = forker.run([*command, str(project.folder), *ports], text=True)

        assert ended.returncode == 1
        assert [json.loads(line)["msg"] for line in ended.stderr.splitlines()] == [
            f'{project.folder}/cortex.yaml:18: api: c: key "nonsense" is not supported',
            f'{project.folder}/cortex.yaml:19: api: c: key "sense" is not supported',
        ]


class TestChecking:
    def check(self, *paths: Path) -> int:
        return cli.main(["check", "--dialect", "cortex", *map(str, paths)])

    def test_the_check_prints_the_apis_and_their_endpoints(
        self, project: Project, capsys: pytest.CaptureFixture[str]
    ) -> None:
        project.api("b", "models/iris.onnx", old=True, tracker={"model_type": "classification", "key": "label"})

        assert self.check(project.folder) == 0

        output = capsys.readouterr().out
        assert "classifier version 1, onnxruntime" in output
        assert "  endpoint   POST /iris/classifier\n" in output
        assert f"  project    {project.folder}, as of Cortex 0.9\n" in output
        assert "  tracker    classification of 'label'\n" in output
        assert f"  hooks      {project.folder}/handler.py" in output
        assert output.endswith("2 versions would be served, 0 mistakes\n")

    def test_the_check_prints_every_mistake(
        self, project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_broken(project)
        project.api("lost", "models/lost.onnx")
        project.api("wrong", "models/iris.onnx", "def pre_inference(sample):\n    return sample\n")
        other = Project(tmp_path / "other", "second")
        other.api("b", "m.onnx", nonsense=1)

        assert self.check(project.folder, other.folder) == 1

        output = capsys.readouterr().out
        assert f'{other.folder}/cortex.yaml:7: api: b: key "nonsense" is not supported\n' in output
        assert f"{project.folder}/cortex.yaml:21: api: lost: onnx: model: models/lost.onnx: not found" in output
        assert f"{project.folder}/wrong.py:1: function pre_inference: expected function arguments" in output
        assert f"{project.folder}/cortex.yaml:17: api: broken: onnx: model: onnx runtime error 7: " in output
        assert output.endswith("1 version would be served, 4 mistakes\n")

    def test_the_check_prints_that_a_fixed_row_axis_may_be_freed(
        self, project: Project, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_iris(project.model("one.onnx"))
        project.api("one", "models/one.onnx")

        assert self.check(project.folder) == 0
        output = capsys.readouterr().out
        assert (
            output.count(
                "none: the model has no batch axis, unless a trial run shows that its first axis of 1 is one\n"
            )
            == 1
        )

    @pytest.mark.slow
    def test_the_check_prints_the_line_of_an_unknown_signature_key(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        examples = Path(__file__).parents[3] / "examples" / "cortex"
        iris = Project(tmp_path / "iris")
        iris.api("a", "s3://penstock-examples/iris/tensorflow", old=True, tf_signature_key="predct")

        assert cli.main(["check", "--dialect", "cortex", "--s3-root", f"{examples}/s3", str(iris.folder)]) == 1
        output = capsys.readouterr()
        text = "api: a: tf_signature_key: the model has no signature 'predct': it has 'predict'\n"
        assert f"{iris.folder}/cortex.yaml:" in output.out
        assert text in output.out
        assert output.err == ""

    @pytest.mark.slow
    def test_the_check_reads_several_models_in_parallel_in_a_new_process(self, project: Project) -> None:
        for number in range(8):
            project.api(f"more-{number}", "models/lost.onnx")

        ended = subprocess.run(
            [sys.executable, "-m", "penstock.server.cli", "check", "--dialect", "cortex", str(project.folder)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

        assert ended.stdout.endswith("1 version would be served, 8 mistakes\n")
        assert (ended.returncode, ended.stderr) == (1, "")

    def test_the_check_prints_that_a_folder_is_not_a_project(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.check(tmp_path) == 1
        assert f"{tmp_path}: not a Cortex project: it has no cortex.yaml\n" in capsys.readouterr().out
