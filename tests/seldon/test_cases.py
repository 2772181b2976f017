"""Every answer recorded from seldon-core, over live REST and gRPC. See record.py for how and scenarios/ for what.

There is one server for each file of cases/, called in the order of the file, as seldon-core was. Bodies and messages
are compared byte for byte, except for the order of a map's entries; the metrics port by its series. What Penstock
answers differently, and why, is in deviations.py.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.server.seldon import command, protos
from penstock.server.settings import Settings, known_settings
from tests.live import live_server
from tests.seldon.deviations import DEVIATIONS
from tests.seldon.replay import HOST, USUAL, play
from tests.seldon.scenarios.all_groups import GROUPS as ASKED
from tests.seldon.scenarios.definitions import Group, Rest, Rpc

CASES, COMPONENTS = Path(__file__).with_name("cases"), Path(__file__).with_name("components")
GROUPS = sorted(path.stem for path in CASES.glob("*.json"))
STATELESS = ["ident-arrays", "ident-messages", "ident-words", "named", "results", "results-of-messages", "raised"]
"""Components to which the order of calls makes no difference."""
_OURS = re.compile(r"^(# \w+ )?(nv|penstock|process)_")
_ORIGINALS = ("PREDICTIVE_UNIT_", "PREDICTOR_", "SELDON_", "FLASK_", "MODEL_", "INCLUDE_METRICS", "PAYLOAD_")


@contextmanager
def served(group: dict[str, Any], *more: str) -> Iterator[dict[str, Any]]:
    """Serve a component with its arguments and environment, on ports that the system chooses."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(_ORIGINALS)]:
            patch.delenv(name)
        for name, value in group["environment"].items():
            patch.setenv(name, value)
        words = [group["component"], *group["arguments"], "--http-port=0", "--grpc-port=0", "--metrics-port=0", *more]
        settings = command.parse_command(words, os.environ, COMPONENTS).settings
        with (
            live_server(**vars_of(settings)) as live,
            grpc.insecure_channel(f"{HOST}:{live.grpc_port}") as channel,
        ):
            yield {"http": live.http_port, "metrics": live.metrics_port, "grpc": channel}


def vars_of(settings: Settings) -> dict[str, Any]:
    """Return settings as live_server takes them."""
    return {item.name: getattr(settings, item.name) for item in known_settings()}


def expected_answer(group: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return the expected answer: seldon-core's, except for the recorded deviations."""
    answer = {name: value for name, value in case["answer"].items() if name != "said"}
    if "rpc" not in case:
        answer.setdefault("headers", USUAL)
    _, otherwise = DEVIATIONS.get(f"{group}/{case['name']}", ("", {}))
    return compared(case, {**answer, **otherwise})


def compared(case: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Drop the parts of an answer that are not seldon-core's, or differ between runs."""
    if case.get("port") == "metrics":
        # the page also has Penstock's series, and groups the series of a name, as Prometheus requires
        lines = {line for line in answer.get("body", "").splitlines() if not _OURS.search(line)}
        return {"status": answer["status"], "lines": sorted(lines)}
    return in_order(case, answer)


def in_order(case: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Sort the maps of a message, whose order differs between runs."""
    if "message" not in answer:
        return answer
    kind = "SeldonModelMetadata" if case["rpc"].endswith("Metadata") else "SeldonMessage"
    message = protos.message_class(kind).FromString(base64.b64decode(answer["message"]))
    return {**answer, "message": base64.b64encode(message.SerializeToString(deterministic=True)).decode()}


def read(name: str) -> dict[str, Any]:
    """Read one file of cases."""
    group: dict[str, Any] = json.loads((CASES / f"{name}.json").read_text("utf-8"))
    return group


def difference(name: str, case: dict[str, Any], ports: dict[str, Any]) -> list[str]:
    """Play a case. Returns: the differences, as text."""
    expected = expected_answer(name, case)
    answer = compared(case, play(case, ports))
    if answer == expected:
        return []
    return [f"{name}/{case['name']}", f"  wanted {_shown(expected)}", f"  was    {_shown(answer)}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_answers_equal_those_recorded_from_seldon_core(name: str) -> None:
    group = read(name)
    with served(group) as ports:
        wrong = [line for case in group["cases"] for line in difference(name, case, ports)]

    assert not wrong, "\n".join(["answered otherwise than the original:", *wrong])


@pytest.mark.slow
@pytest.mark.parametrize("name", STATELESS)
def test_answers_to_concurrent_batched_calls_equal_those_recorded_from_seldon_core(name: str) -> None:
    group = read(name)
    with served(group, "--batching") as ports, ThreadPoolExecutor(16) as pool:
        found = pool.map(lambda case: difference(name, case, ports), group["cases"] * 3)
        wrong = [line for lines in found for line in lines]

    assert not wrong, "\n".join(["answered otherwise than the original:", *wrong])


@pytest.mark.parametrize("group", ASKED, ids=lambda group: group.name)
def test_recorded_cases_match_the_requests_in_the_asked_modules(group: Group) -> None:
    recorded = read(group.name)

    assert [recorded["component"], recorded["environment"], recorded["arguments"]] == [
        group.component, group.environment, group.arguments,
    ]  # fmt: skip
    assert [(case["name"], case.get("rpc") or case["path"]) for case in recorded["cases"]] == [
        (request.name, request.path if isinstance(request, Rest) else request.method)
        for request in group.requests
        if isinstance(request, Rest | Rpc)
    ]


def test_every_deviation_belongs_to_a_recorded_case() -> None:
    known = {f"{name}/{case['name']}" for name in GROUPS for case in read(name)["cases"]}

    assert DEVIATIONS.keys() <= known


def _shown(answer: dict[str, Any]) -> str:
    return " ".join(f"{name}={value!r}" for name, value in answer.items() if value != USUAL)
