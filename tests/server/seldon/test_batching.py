"""With --batching, calls that share a batch are answered as if each had run alone, byte for byte."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.spec import BatchPolicy
from penstock.server.carrying.calls import RAW
from penstock.server.seldon import protos
from penstock.server.seldon.batching import MAX_FAILURES, Sharing
from penstock.server.seldon.calls import SeldonCall
from penstock.server.seldon.inside.service import SeldonInside
from penstock.server.seldon.messages import (
    APART,
    CALL,
    ROWS,
    TOGETHER,
    ComponentDescription,
    Endpoint,
    PayloadKind,
    read_answer,
)
from tests.live import live_server
from tests.server.carrying.crews import Ledger
from tests.server.seldon.crews import SeldonStage

BATCHES = ComponentDescription(batches=True)


class Doubling:
    """Doubles each row, so that answers do not depend on the batch. Raises for a 13."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def predict(self, rows: Any, names: Any) -> Any:
        self.calls.append(len(rows) if hasattr(rows, "__len__") else 0)
        if isinstance(rows, np.ndarray) and rows.dtype.kind in "iuf" and (rows == 13).any():
            raise ValueError("thirteen")
        if isinstance(rows, np.ndarray) and rows.dtype.kind in "US":
            return rows
        return -rows if "minus" in names else rows * 2

    def tags(self) -> Any:
        return {"tagged": True}

    def metrics(self) -> Any:
        return [{"type": "COUNTER", "key": "calls", "value": 1}]


class Listing(Doubling):
    """Returns lists, and names their columns."""

    def predict(self, rows: Any, names: Any) -> Any:
        return super().predict(rows, names).tolist()

    def class_names(self) -> list[str]:
        return ["one", "two"]


class Watched:
    """A worker's service that records its calls."""

    def __init__(self, user: Any) -> None:
        self.inside = SeldonInside(user, {"strict": True})
        self.description = self.inside.description
        self.ran: list[bytes] = []
        self.kinds: list[int] = []

    def call(self, kind: int, number: int, body: bytes, arrays: Any) -> Any:
        self.kinds.append(kind)
        self.ran.append(body[2:])
        return self.inside.call(kind, number, body, arrays)


Request = tuple[PayloadKind, bytes]


def answers(
    user: Any, requests: list[Request], monkeypatch: pytest.MonkeyPatch, *, shares: bool, deadly: bytes = b"never",
    rounds: int = 1,
) -> tuple[list[Any], Watched, Any]:  # fmt: skip
    """Return the answers to the requests, the service and the statistics."""
    service = Watched(user)
    stage = SeldonStage(service, lambda body: "die" if deadly in body else "answer")
    ledger = Ledger()
    counted: list[Any] = []

    async def scene(engine: Engine, model: Model) -> None:
        sharing = stage.models.sharing.get(model.name)
        assert (sharing is not None) == shares
        for turn in range(rounds):
            for number, (form, body) in enumerate(requests):
                calls = (
                    SeldonCall(model, Endpoint.PREDICT, form, body, ledger)
                    if sharing is None
                    else sharing.make_call(model, Endpoint.PREDICT, form, body, ledger)
                )
                calls.context = turn, number
                engine.submit(calls)
            await ledger.all((turn + 1) * len(requests))
        counted.append(model.statistics.snapshot())

    stage.run(
        monkeypatch, scene, policy=BatchPolicy(default_max_batch_rows=16), batching=str(shares).lower()
    )  # fmt: skip
    assert all(len(ends) == 1 for ends in ledger.ends.values())
    return [ledger.ends[0, number][0] for number in range(len(requests))], service, counted[0]


def json_request(**message: Any) -> Request:
    return PayloadKind.JSON, json.dumps(message).encode()


def rows_of(chance: random.Random) -> Any:
    values: list[Any] = chance.choice([[1, 2, 3], [0.5, 1.5, 1e300], [1, 2.5], [True, False], ["a", "b"], [2**63, 1]])
    values = [*values, 13] if chance.random() < 0.05 else values
    shape = chance.choice([(1, 2), (2, 2), (3, 2), (1, 3), (2,), (1, 2, 2), (0,), (20, 2)])
    return np.array([chance.choice(values) for _ in range(int(np.prod(shape)))], object).reshape(shape).tolist()


def any_request(chance: random.Random) -> Request:
    rows = rows_of(chance)
    data: dict[str, Any] = {"ndarray": rows}
    if chance.random() < 0.4:
        flat = np.array(rows, object)
        data = {"tensor": {"shape": list(flat.shape), "values": flat.ravel().tolist()}}
    if chance.random() < 0.4:
        data["names"] = chance.choice([["a", "b"], ["minus", "b"], [], None, "ab", [1, 2]])
    message: dict[str, Any] = {"data": data}
    if chance.random() < 0.3:
        message["meta"] = chance.choice(
            [{}, {"puid": "p"}, {"tags": {"a": 1.5}}, {"metrics": [{"type": "GAUGE", "key": "g", "value": 1}]}, None, 3]
        )
    if chance.random() < 0.3:
        return as_proto(message)
    body = json.dumps(message).encode()
    return PayloadKind.JSON, chance.choice([body] * 9 + [body[:-2], b"", b"[]", body + b" "])


def as_proto(message: dict[str, Any]) -> Request:
    proto = protos.message_class("SeldonMessage")()
    from google.protobuf import json_format

    try:
        json_format.ParseDict(message, proto)
    except json_format.ParseError:
        return PayloadKind.PROTO, b"\xff"
    return PayloadKind.PROTO, proto.SerializeToString()


@pytest.mark.parametrize("component", [Doubling, Listing])
@pytest.mark.parametrize("seed", range(25))
def test_batched_calls_are_answered_as_if_each_had_run_alone(
    seed: int, component: type[Doubling], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    kinds = [any_request(chance) for _ in range(12)]
    requests = [chance.choice(kinds) for _ in range(60)]

    alone, _, counted = answers(component(), requests, monkeypatch, shares=False)
    shared, service, of_shared = answers(component(), requests, monkeypatch, shares=True)

    assert shared == alone
    assert ROWS in service.kinds
    assert counted.execution_count == counted.success.count == 60
    assert of_shared.success.count == 60


def test_predict_receives_names_as_a_list_for_batched_protobuf_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noting:
        def __init__(self) -> None:
            self.kinds: set[type] = set()

        def predict(self, x: Any, names: Any) -> Any:
            self.kinds.add(type(names))
            return x

    user = Noting()
    requests = [as_proto({"data": {"names": ["a"], "ndarray": [[number]]}}) for number in range(16)]

    _, service, _ = answers(user, requests, monkeypatch, shares=True)

    assert ROWS in service.kinds
    assert user.kinds == {list}


def test_rows_that_arrive_together_run_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    user = Doubling()
    requests = [json_request(data={"ndarray": [[number, 2]]}) for number in range(20, 36)]

    _, _, counted = answers(user, requests, monkeypatch, shares=True)

    assert user.calls == [16]
    assert (counted.inference_count, counted.execution_count) == (16, 1)


def test_slow_calls_still_run_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr("penstock.server.carrying.worker_slots.time.monotonic_ns", lambda: now[0])

    class Slow(Doubling):
        def predict(self, rows: Any, names: Any) -> Any:
            now[0] += 10_000_000
            return super().predict(rows, names)

    user = Slow()
    requests = [json_request(data={"ndarray": [[number, 2]]}) for number in range(20, 36)]

    answers(user, requests, monkeypatch, shares=True, rounds=20)

    assert user.calls[-1] == 16


def test_a_row_that_predict_rejects_fails_alone_when_its_batch_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [json_request(data={"ndarray": [[number]]}) for number in range(10, 16)]

    found, service, counted = answers(Doubling(), requests, monkeypatch, shares=True)

    assert [b"thirteen" in reply for reply in found] == [False, False, False, True, False, False]
    assert service.kinds == [ROWS] + [CALL] * 6
    assert [(entry.rows, entry.count) for entry in counted.batch_stats] == [(1, 6)]


def test_only_the_faulty_call_fails_when_a_batch_kills_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [json_request(data={"ndarray": [[number]]}, meta={"puid": f"p{number}"}) for number in range(6)]

    found, _, _ = answers(Doubling(), requests, monkeypatch, shares=True, deadly=b"p4")

    assert [reply == "ended" for reply in found] == [False, False, False, False, True, False]


def test_calls_too_long_for_the_wire_fail_and_later_calls_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SeldonStage(Watched(Doubling()))
    stage.travels = lambda body: b"heavy" not in body
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        for turn, puid in enumerate(("heavy", "light")):
            for number in range(3):
                _, body = json_request(data={"ndarray": [[number]]}, meta={"puid": puid})
                call = stage.models.sharing[model.name].make_call(
                    model, Endpoint.PREDICT, PayloadKind.JSON, body, ledger
                )
                call.context = puid, number
                engine.submit(call)
            await ledger.all((turn + 1) * 3)

    stage.run(monkeypatch, scene, policy=BatchPolicy(default_max_batch_rows=16), batching="true")

    assert [ledger.ends["heavy", number] for number in range(3)] == [["component 'Staged': too long"]] * 3
    assert all(b'"puid":"light"' in end for number in range(3) for end in ledger.ends["light", number])


def test_batching_stops_after_repeated_batches_kill_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [json_request(data={"ndarray": [[number]]}) for number in range(4)]

    found, service, _ = answers(
        Doubling(), requests, monkeypatch, shares=True, deadly=b'"envelopes"', rounds=MAX_FAILURES + 4
    )

    assert all(b'"ndarray":[[' in reply for reply in found)
    assert sum(b'"envelopes"' in ran for ran in service.ran) == MAX_FAILURES


class Telling(Doubling):
    """Returns tags for each call."""

    def predict(self, rows: Any, names: Any) -> Any:
        from seldon_core.user_model import SeldonResponse

        self.calls.append(len(rows))
        return SeldonResponse(rows, tags={"rows": len(rows)})


class Pooling(Doubling):
    """Sums over all rows, so its results do not have one row for each input row."""

    def predict(self, rows: Any, names: Any) -> Any:
        self.calls.append(len(rows))
        return rows.sum(axis=0, keepdims=True)


def test_a_successful_batch_resets_the_count_of_failed_batches() -> None:
    sharing = Sharing(BATCHES, 64)

    for _ in range(MAX_FAILURES - 1):
        sharing.record_outcome(APART)
    sharing.record_outcome(TOGETHER)
    for _ in range(MAX_FAILURES - 1):
        sharing.record_outcome(APART)
    assert sharing.allowed
    sharing.record_outcome(APART)
    assert not sharing.allowed


def test_batching_stops_once_a_component_returns_tags_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [json_request(data={"ndarray": [[number]]}) for number in range(4)]

    found, service, _ = answers(Telling(), requests, monkeypatch, shares=True, rounds=3)

    assert all(b'"rows":1' in reply for reply in found)
    assert service.kinds == [ROWS] + [CALL] * 12


def test_batching_stops_after_repeated_batches_return_the_wrong_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [json_request(data={"ndarray": [[number]]}) for number in range(2)]

    alone, _, _ = answers(Pooling(), requests, monkeypatch, shares=False)
    shared, service, _ = answers(Pooling(), requests, monkeypatch, shares=True, rounds=MAX_FAILURES + 3)

    assert shared == alone
    assert service.kinds.count(ROWS) == MAX_FAILURES


class Shaped:
    """Stands in for the Model of a SeldonCall."""


@pytest.mark.parametrize(
    ("message", "shared"),
    [
        ({"data": {"ndarray": [[1, 2]]}}, True),
        ({"data": {"tensor": {"shape": [1, 2], "values": [1, 2]}}}, True),
        ({"data": {"ndarray": [1, 2]}}, False),
        ({"data": {"ndarray": [["a"]]}}, False),
        ({"data": {"ndarray": [[None]]}}, False),
        ({"data": {"ndarray": [[1], [2, 3]]}}, False),
        ({"data": {"ndarray": []}}, False),
        ({"data": {"ndarray": [[1]] * 5}}, False),
        ({"data": {"ndarray": [[1]], "names": None}}, False),
        ({"data": {"tensor": {"shape": [2, 2], "values": [1]}}}, False),
        ({"data": {"names": ["a"]}}, False),
        ({"strData": "hi"}, False),
        ({"data": {"ndarray": [[1]]}, "meta": 3}, False),
        ({"data": {"ndarray": [[1]]}, "meta": {"puid": "p"}}, True),
    ],
)
def test_only_calls_with_rows_of_numbers_may_share_a_batch(message: dict[str, Any], shared: bool) -> None:
    body = json.dumps(message).encode()

    call = Sharing(BATCHES, 4).make_call(Shaped(), Endpoint.PREDICT, PayloadKind.JSON, body, Ledger())  # type: ignore[arg-type]

    assert (call.key != RAW) == shared
    assert call.body == bytes((Endpoint.PREDICT, PayloadKind.JSON)) + body


def key_of(sharing: Sharing, **message: Any) -> Any:
    body = json.dumps(message).encode()
    return sharing.make_call(Shaped(), Endpoint.PREDICT, PayloadKind.JSON, body, Ledger()).key  # type: ignore[arg-type]


def test_calls_that_differ_in_more_than_their_rows_have_different_keys() -> None:
    sharing = Sharing(BATCHES, 4)
    keys = [
        key_of(sharing, data={"ndarray": [[1, 2]]}),
        key_of(sharing, data={"ndarray": [[1.0, 2]]}),
        key_of(sharing, data={"ndarray": [[1, 2, 3]]}),
        key_of(sharing, data={"ndarray": [[1, 2]], "names": ["a", "b"]}),
        key_of(sharing, data={"tensor": {"shape": [1, 2], "values": [1, 2]}}),
    ]

    assert len({*keys}) == 5
    assert key_of(sharing, data={"ndarray": [[3, 4], [5, 6]]}) == keys[0]


def test_calls_with_meta_run_alone_when_predict_takes_meta() -> None:
    sharing = Sharing(ComponentDescription(batches=True, takes_meta=True), 4)

    assert key_of(sharing, data={"ndarray": [[1]]}) != RAW
    assert key_of(sharing, data={"ndarray": [[1]]}, meta={}) == RAW


def test_calls_other_than_predict_never_share_a_batch() -> None:
    body = json.dumps({"data": {"ndarray": [[1]]}}).encode()
    sharing = Sharing(BATCHES, 4)

    for endpoint in (Endpoint.TRANSFORM_INPUT, Endpoint.ROUTE, Endpoint.FEEDBACK):
        assert sharing.make_call(Shaped(), endpoint, PayloadKind.JSON, body, Ledger()).key == RAW  # type: ignore[arg-type]


def test_metrics_are_counted_for_each_call_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [json_request(data={"ndarray": [[number]]}) for number in range(5)]

    found, _, _ = answers(Doubling(), requests, monkeypatch, shares=True)

    assert all(b'"calls"' in read_answer(reply)[1] for reply in found)


MISBEHAVING = """
import os


class Misbehaving:
    def predict(self, X, names):
        if (X == 13).any():
            while True:
                pass
        if (X == 14).any():
            os._exit(1)
        return X
"""


@pytest.mark.slow
@pytest.mark.parametrize(("guilty", "message"), [(13, "took longer than its limit"), (14, "ended")])
def test_a_call_that_ends_its_worker_fails_alone_in_its_batch(guilty: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "Misbehaving.py").write_text(MISBEHAVING)
    values = [1, 2, guilty, 3, 4, 5]
    with live_server(
        tmp_path, dialect="seldon", seldon_component="Misbehaving", seldon_batching=True, seldon_timeout_secs=0.5
    ) as live:  # fmt: skip

        def ask(value: int) -> httpx.Response:
            return httpx.post(f"{live.url}/predict", json={"data": {"ndarray": [[value]]}}, timeout=30)

        with ThreadPoolExecutor(len(values)) as pool:
            found = dict(zip(values, pool.map(ask, values), strict=True))

    assert {value: answer.status_code == 200 for value, answer in found.items()} == {
        value: value != guilty for value in values
    }
    assert message in found[guilty].json()["status"]["info"]
