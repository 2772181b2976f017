"""The reasons that clients get when a model cannot be served."""

from __future__ import annotations

from pathlib import Path

from penstock.server.repository.findings import Finding
from penstock.server.repository.scan import ModelEntry
from penstock.server.repository.transitions import _failure_reasons, without_location


def test_reasons_do_not_reveal_the_path_of_the_model() -> None:
    entry = ModelEntry("m", Path("/x/text"))

    assert without_location("/x/text/1/model.onnx: no, /x/text is wrong", entry) == "1/model.onnx: no, m is wrong"


def test_paths_that_only_start_like_the_models_are_unchanged_in_reasons() -> None:
    entry = ModelEntry("m", Path("/x/text"))

    for other in ("/x/text-pinned/cortex.yaml", "/x/text.old/1", "/x/texts"):
        assert without_location(f"as in {other}", entry) == f"as in {other}"


def test_a_finding_reported_twice_appears_once_in_the_reason() -> None:
    finding = Finding(Path("/x/m/config.pbtxt"), "is wrong", 3)

    entry = ModelEntry("m", Path("/x/m"), findings=(finding, finding))

    assert _failure_reasons(entry) == {0: "config.pbtxt:3: is wrong"}
