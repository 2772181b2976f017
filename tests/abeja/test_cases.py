"""Every answer of the original, as it was recorded, over live HTTP: record.py says how, and asked/ what.

A server is asked what each file of cases/ has that was recorded of a server like it, in the order of the file, as the
original was. What we answer otherwise, and why, is in deviations.py.
"""

from __future__ import annotations

import pytest

from tests.abeja.asked.everything import GROUPS
from tests.abeja.deviations import DEVIATIONS, STRICT
from tests.abeja.original import ORIGINAL
from tests.abeja.serving import as_said
from tests.originals import Group


@pytest.mark.slow
@pytest.mark.parametrize("names", ORIGINAL.alike(), ids="+".join)
def test_the_answers_are_the_original_s(names: list[str]) -> None:
    with as_said(ORIGINAL.read(names[0])["server"]) as served:
        wrong = [line for name in names for line in ORIGINAL.differences(name, served.ports, DEVIATIONS)]

    assert not wrong, "\n".join(["answered otherwise than the original:", *wrong])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["contents", "contents-as-json", "tables"])
def test_strictly_even_bytes_are_answered_as_the_original_did(name: str) -> None:
    with as_said(ORIGINAL.read(name)["server"], "--abeja-strict") as served:
        wrong = ORIGINAL.differences(name, served.ports, STRICT)

    assert not wrong, "\n".join(["answered otherwise than the original:", *wrong])


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_what_is_recorded_is_what_is_asked(group: Group) -> None:
    recorded = ORIGINAL.read(group.name)

    assert recorded["server"] == group.server
    assert [{name: value for name, value in case.items() if name != "answer"} for case in recorded["cases"]] == [
        asked.written() for asked in group.asked
    ]


def test_each_file_is_of_a_group() -> None:
    assert ORIGINAL.names() == sorted(group.name for group in GROUPS)


def test_each_deviation_is_of_a_case() -> None:
    known = {f"{group.name}/{asked.name}" for group in GROUPS for asked in group.asked}

    assert DEVIATIONS.keys() <= known
