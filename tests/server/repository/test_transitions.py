"""What a client is told of why a model cannot be served."""

from __future__ import annotations

from pathlib import Path

from penstock.server.repository.findings import Finding
from penstock.server.repository.scan import Entry
from penstock.server.repository.transitions import _mistakes, hidden


def test_where_a_model_is_on_disk_is_left_out_of_reasons() -> None:
    entry = Entry("m", Path("/x/text"))

    assert hidden("/x/text/1/model.onnx: no, /x/text is wrong", entry) == "1/model.onnx: no, m is wrong"


def test_a_folder_whose_name_begins_alike_is_another() -> None:
    entry = Entry("m", Path("/x/text"))

    for other in ("/x/text-pinned/cortex.yaml", "/x/text.old/1", "/x/texts"):
        assert hidden(f"as in {other}", entry) == f"as in {other}"


def test_what_is_found_twice_is_told_once() -> None:
    finding = Finding(Path("/x/m/config.pbtxt"), "is wrong", 3)

    assert _mistakes(Entry("m", Path("/x/m"), findings=(finding, finding))) == {0: "config.pbtxt:3: is wrong"}
