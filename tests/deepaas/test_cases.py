"""Every answer of the original, as it was recorded, over a live server: record.py says how, and scenarios/ what.

A server is asked what each file of cases/ has that was recorded of a server like it, in the order of the file, as the
original was; it knows no trainings of another file. Bodies are compared by their bytes, but for what differs from run
to run, and swagger.json by what it says. What we answer otherwise, and why, is in deviations.py.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.deepaas.command_runs import COMMANDS, run
from tests.deepaas.deviations import COMMANDS as OTHERWISE
from tests.deepaas.deviations import DEVIATIONS
from tests.deepaas.replay import ORIGINAL
from tests.deepaas.scenarios.all_groups import GROUPS as ASKED
from tests.deepaas.scenarios.commands import COMMANDS as TOLD
from tests.deepaas.serving import PENSTOCK, serve_words, served, served_apart
from tests.forking import Forker
from tests.originals import HOST, Group

COMMANDED: list[dict[str, Any]] = json.loads(COMMANDS.read_text("utf-8"))
IN_TRUTH = {
    "metadata-stored",
    "predict-stored-file",
    "unknown-method",
    "run-bad-file",
    "run-warm-fails",
    "run-warm-later",
}
"""The commands that are started in truth: for the others that takes longer than what they do."""


@pytest.mark.slow
@pytest.mark.parametrize("names", ORIGINAL.alike(), ids="+".join)
def test_the_answers_are_the_original_s(names: list[str]) -> None:
    server, wrong = ORIGINAL.read(names[0])["server"], []
    with served(server) as port:
        for name in names:
            wrong += ORIGINAL.differences(name, port, DEVIATIONS)
            if name is not names[-1]:
                forget_trainings(server["models"], port)

    assert not wrong, "\n".join(["answered otherwise than the original:", *wrong])


@pytest.mark.slow
def test_they_are_the_same_of_models_that_are_not_installed() -> None:
    with served_apart(ORIGINAL.read("documented")["server"], serve_words) as port:
        wrong = ORIGINAL.differences("documented", port, DEVIATIONS)

    assert not wrong, "\n".join(["answered otherwise than the original:", *wrong])


@pytest.mark.slow
@pytest.mark.parametrize("case", COMMANDED, ids=lambda case: case["name"])
def test_a_command_does_what_the_original_s_did(case: dict[str, Any], forker: Forker) -> None:
    _, otherwise = OTHERWISE.get(case["name"], ("", {}))

    done = run(case, [PENSTOCK, case["program"]], subprocess.Popen if case["name"] in IN_TRUTH else forker.start)

    assert compared(done) == compared(otherwise or case["answer"])


def forget_trainings(models: Iterable[str], port: int) -> None:
    """Have a server know of none."""
    for url in [f"http://{HOST}:{port}/v2/models/{model}/train/" for model in models]:
        with urlopen(url) as answer:
            uuids = [training["uuid"] for training in json.load(answer)]
        for uuid in uuids:
            urlopen(Request(url + uuid, method="DELETE")).close()


def compared(answer: dict[str, Any]) -> dict[str, Any]:
    """Leave out in which words it fails; those of a wrong command line count."""
    return {name: value for name, value in answer.items() if name != "last" or answer["exit"] == 2}


@pytest.mark.parametrize("group", ASKED, ids=lambda group: group.name)
def test_what_is_recorded_is_what_is_asked(group: Group) -> None:
    recorded = ORIGINAL.read(group.name)

    assert recorded["server"] == group.server
    assert [{**case, "answer": None} for case in recorded["cases"]] == [
        {**request.written(), "answer": None} for request in group.requests
    ]


def test_what_was_told_is_what_is_recorded() -> None:
    assert [{**case, "answer": None} for case in COMMANDED] == [{**call.written(), "answer": None} for call in TOLD]


def test_each_deviation_is_of_a_case() -> None:
    assert DEVIATIONS.keys() <= {
        f"{name}/{case['name']}" for name in ORIGINAL.names() for case in ORIGINAL.read(name)["cases"]
    }
    assert OTHERWISE.keys() <= {case["name"] for case in COMMANDED}
