"""Ensembles in a repository: their configuration, the order in which they load, and `penstock check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backends.loading import LOADERS
from penstock.batching.spec import EnsembleSpec, Step
from penstock.server.repository.check import check
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.load_order import sort_by_dependency
from penstock.server.repository.scan import read_folder
from penstock.server.repository.states import ModelRecord, ModelState
from tests.clients.ensembles import CHAIN, config, step, write_ensemble, write_models
from tests.server.repository.configs import read_text

ONE = step("m", [("x", "in")], [("y", "out")])
PLAIN = config("m", ["in"], ["out"], [ONE])


class TestConfiguration:
    def test_the_steps_of_an_ensemble_are_read(self) -> None:
        statement, findings = read_text(
            PLAIN.replace("ensemble_scheduling {", "ensemble_scheduling { max_inflight_requests: 3").replace("-1", "2")
        )

        assert findings == []
        assert statement.values["ensemble"] == EnsembleSpec((Step("m", "2", {"x": "in"}, {"y": "out"}),), 3)
        assert "model.backend" not in statement.values

    def test_the_ensemble_in_the_docs_is_valid(self) -> None:
        page = (Path(__file__).parents[3] / "docs" / "ensembles.md").read_text("utf-8")
        text = page.split("```")[1].replace('"pipeline"', '"m"')

        statement, findings = read_text(text)
        assert findings == []
        assert [step.version for step in statement.values["ensemble"].steps] == ["", "", "2"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                PLAIN.replace('platform: "ensemble"', ""),
                "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
            ),
            (
                'name: "m" platform: "ensemble"',
                "ensemble scheduling must be set for ensemble m whose platform is ensemble",
            ),
            (PLAIN + "instance_group { }", "instance group should not be specified for ensemble 'm'"),
            (PLAIN + "optimization { }", "optimization should not be specified for ensemble 'm'"),
            (PLAIN + "model_warmup { }", "model_warmup can not be specified for ensemble 'm'"),
            (
                PLAIN + 'backend: "onnxruntime"',
                "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
            ),
            (
                PLAIN.replace("model_version: -1", ""),
                "step 0 of ensemble 'm': model_version must be -1, for the latest, or above 0",
            ),
            (config("m", ["in"], ["out", "more"], [ONE]), "ensemble output 'more' for ensemble 'm' is not used"),
            (
                PLAIN.replace("model_version: -1", 'model_version: -1 model_namespace: "n"'),
                "field 'ensemble_scheduling.step.model_namespace' is not supported",
            ),
        ],
    )
    def test_an_invalid_ensemble_is_rejected_with_tritons_message(self, text: str, message: str) -> None:
        assert message in [finding.message for finding in read_text(text)[1]]

    def test_parameters_of_an_ensemble_are_informational(self) -> None:
        """Riva's clients read them. An ensemble runs nothing itself to which a known parameter could apply."""
        statement, findings = read_text(PLAIN + "".join(f'parameters {{ key: "{name}" value {{ string_value: "x" }} }}'
                              for name in ("chunk_size", "execution_mode")))  # fmt: skip

        assert [(finding.is_mistake, finding.message.partition(":")[0]) for finding in findings] == [
            (False, "parameter 'chunk_size' is informational"),
            (False, "parameter 'execution_mode' is informational"),
        ]
        assert not [name for name in statement.values if name.startswith("runtime.")]

    def test_the_folder_of_an_ensemble_needs_a_version_but_no_file(self, tmp_path: Path) -> None:
        write_ensemble(tmp_path, "chain", CHAIN, 1, 3)
        entry = read_folder(tmp_path / "chain", Defaults())

        assert entry is not None
        assert ([spec.version for spec in entry.specs], entry.findings) == ([3], ())
        assert entry.dependencies == {"double", "plus"}
        assert entry.config.default_model_filename == ""

    def test_an_option_that_does_not_apply_to_ensembles_is_rejected(self, tmp_path: Path) -> None:
        write_ensemble(tmp_path, "chain", CHAIN)
        (tmp_path / "chain" / "penstock.toml").write_text("[batching]\nmax_batch_size = 8\ncap = 4\n")
        entry = read_folder(tmp_path / "chain", Defaults())

        assert entry is not None
        assert [finding.message for finding in entry.findings] == ["batching.cap does not apply to an ensemble"]


class TestOrder:
    def test_every_model_loads_after_its_dependencies(self) -> None:
        order, circles = sort_by_dependency({"a": ["b", "c"], "b": ["c"], "c": ["elsewhere"], "d": []})

        assert (order, circles) == (["c", "d", "b", "a"], {})

    def test_a_circular_dependency_is_reported_for_each_of_its_ensembles(self) -> None:
        order, circles = sort_by_dependency({"a": ["b"], "b": ["a"], "c": ["a"], "d": []})

        assert (order[0], set(order)) == ("d", {"a", "b", "c", "d"})
        assert circles == {
            "a": "circular dependency between ensembles: a -> ... -> b -> a",
            "b": "circular dependency between ensembles: b -> ... -> a -> b",
        }


class TestCheck:
    def test_check_reports_a_valid_ensemble(self, tmp_path: Path) -> None:
        write_models(tmp_path)
        write_ensemble(tmp_path, "chain", CHAIN)
        report = check([tmp_path], LOADERS)

        assert report.mistakes == []
        assert "chain version 1, ensemble" in str(report)
        assert "double latest" in str(report)

    def test_check_reports_tensors_that_do_not_fit(self, tmp_path: Path) -> None:
        write_models(tmp_path)
        write_ensemble(tmp_path, "wrong", CHAIN.replace('"chain"', '"wrong"').replace("dims: [ 4 ]", "dims: [ 5 ]"))

        text = "inconsistent shape: [-1,5] is inferred from model wrong while [-1,4] is inferred from model double"
        (mistake,) = check([tmp_path], LOADERS).mistakes
        assert mistake.message == f"in ensemble wrong, ensemble tensor in: {text}"


def test_an_ensemble_unloaded_with_its_step_does_not_affect_readiness() -> None:
    record = ModelRecord("e")
    record.begin_load([1])
    record.serve([1])
    record.mark_unloaded(record.unload(), "unloaded: ensemble 'e' depends on 'x' which has no loaded version")

    (held,) = record.statuses()
    assert (held.state, held.should_serve) == (ModelState.UNAVAILABLE, False)
