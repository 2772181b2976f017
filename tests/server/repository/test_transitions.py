"""What a client is told of why a model cannot be served."""

from __future__ import annotations

from pathlib import Path

from penstock.server.repository.findings import Finding
from penstock.server.repository.scan import ModelEntry
from penstock.server.repository.transitions import _failure_reasons, without_location


def test_where_a_model_is_on_disk_is_left_out_of_reasons() -> None:
    entry = ModelEntry("m", Path("/x/text"))

    assert without_location("/x/text/1/model.onnx: no, /x/text is wrong", entry) == "1/model.onnx: no, m is wrong"


def test_a_folder_whose_name_begins_alike_is_another() -> None:
    entry = ModelEntry("m", Path("/x/text"))

    for other in ("/x/text-pinned/cortex.yaml", "/x/text.old/1", "/x/texts"):
        assert without_location(f"as in {other}", entry) == f"as in {other}"


def test_what_is_found_twice_is_told_once() -> None:
    finding = Finding(Path("/x/m/config.pbtxt"), "is wrong", 3)

    entry = ModelEntry("m", Path("/x/m"), findings=(finding, finding))

    assert _failure_reasons(entry) == {0: "config.pbtxt:3: is wrong"}
