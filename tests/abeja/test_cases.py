"""Every recorded answer of the original, compared over live HTTP; record.py records the requests of scenarios/.

A server gets the requests of all files of cases/ that were recorded from a server like it, in the order of the files,
as the original did. Answers that differ, and why, are in deviations.py.
"""

from __future__ import annotations

import pytest

from tests.abeja.deviations import DEVIATIONS, STRICT
from tests.abeja.original import ORIGINAL
from tests.abeja.scenarios.all_groups import GROUPS
from tests.abeja.serving import serving_group
from tests.originals import Group


@pytest.mark.slow
@pytest.mark.parametrize("names", ORIGINAL.alike(), ids="+".join)
def test_recorded_requests_are_answered_as_by_the_original(names: list[str]) -> None:
    with serving_group(ORIGINAL.read(names[0])["server"]) as served:
        wrong = [line for name in names for line in ORIGINAL.differences(name, served.ports, DEVIATIONS)]

    assert not wrong, "\n".join(["answered otherwise than the original:", *wrong])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["contents", "contents-as-json", "tables"])
def test_bytes_are_answered_as_by_the_original_in_strict_mode(name: str) -> None:
    with serving_group(ORIGINAL.read(name)["server"], "--abeja-strict") as served:
        wrong = ORIGINAL.differences(name, served.ports, STRICT)

    assert not wrong, "\n".join(["answered otherwise than the original:", *wrong])


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_recorded_cases_equal_the_defined_cases(group: Group) -> None:
    recorded = ORIGINAL.read(group.name)

    assert recorded["server"] == group.server
    assert [{name: value for name, value in case.items() if name != "answer"} for case in recorded["cases"]] == [
        request.written() for request in group.requests
    ]


def test_each_recorded_file_belongs_to_a_group() -> None:
    assert ORIGINAL.names() == sorted(group.name for group in GROUPS)


def test_each_deviation_belongs_to_a_case() -> None:
    known = {f"{group.name}/{request.name}" for group in GROUPS for request in group.requests}

    assert DEVIATIONS.keys() <= known
