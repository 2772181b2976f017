"""What every CarryingService guarantees a connection: one answer for each request, and never another's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.server.abeja.service import AbejaService
from penstock.server.carrying.messages import pack_answer
from penstock.server.carrying.service import CarryingService
from penstock.server.deepaas.service import DeepaasService
from penstock.server.dialects import dialect_of
from penstock.server.http.service import HttpShared
from penstock.server.listening.ports import make_http_port
from penstock.server.restricted import RestrictedApis
from penstock.server.seldon.current_component import CurrentComponent
from penstock.server.seldon.messages import ANSWER
from penstock.server.seldon.service import SeldonService
from penstock.server.settings import Settings
from tests.fakes import fake_model
from tests.server.http.lane import Answer, Lane, Own, run, turns
from tests.server.v2.held_engine import HeldEngine


@dataclass
class OneModel(HeldEngine):
    """An Engine whose only model has any name, once it is `present`."""

    present: bool = True

    def model(self, name: str, version: str = "") -> Model:
        if not self.present:
            raise InferError(Code.NOT_FOUND, f"no '{name}'")
        return self.loaded[0]

    def answer(self, *replies: bytes) -> None:
        """Answer all submitted calls in one delivery."""
        batch, self.held = self.held, []
        for call, reply in zip(batch, replies, strict=True):
            cast(Any, call).reply, call.outputs = reply, []
        batch[0].sink.deliver(batch)


class Others(Own):
    """Penstock's own paths, below /v2/repository."""

    restricted = RestrictedApis()

    def claim(self, head: Any) -> Any:
        return "own" if head.path.startswith(b"/v2/repository") else None


@dataclass(frozen=True)
class Kind:
    """One dialect: how its Service is made, a path that a worker answers, and how the worker answers."""

    dialect: str
    make: Callable[[Any, Others, Settings], CarryingService[Any]]
    path: str
    reply: Callable[[int, bytes], bytes]

    def request_body(self, size: int = 2) -> bytes:
        """Write a request that a worker answers."""
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
        )
        return head.encode() + b"[" + b" " * (size - 2) + b"]"


def _seldon(engine: Any, others: Others, settings: Settings) -> CarryingService[Any]:
    models: Any = SimpleNamespace(descriptions={}, sharing={})
    return SeldonService(engine, CurrentComponent(engine, lambda: "m", models), cast(Any, None), others, settings)


def _deepaas(engine: Any, others: Others, settings: Settings) -> CarryingService[Any]:
    parts: Any = SimpleNamespace(engine=engine, inference=others, repository=SimpleNamespace(names=lambda: ["m"]))
    return DeepaasService(parts, cast(Any, None), settings)


def _abeja(engine: Any, others: Others, settings: Settings) -> CarryingService[Any]:
    return AbejaService(engine, others, lambda: True, ())


def _of_seldon(status: int, body: bytes) -> bytes:
    return ANSWER.pack(status, 0, 0) + body


def _packed(status: int, body: bytes) -> bytes:
    return pack_answer(status, b"application/json", body)


KINDS = [
    Kind("seldon", _seldon, "/predict", _of_seldon),
    Kind("deepaas", _deepaas, "/v2/models/m/predict/", _packed),
    Kind("abeja", _abeja, "/any/path", _packed),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.dialect)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Return each dialect in turn."""
    found: Kind = request.param
    return found


class Served(Lane):
    """A connection with the Service of a dialect."""

    def __init__(self, kind: Kind, engine: OneModel | None = None) -> None:
        self.kind, self.engine, self.others = kind, engine or OneModel(), Others()
        settings = Settings(dialect=kind.dialect, model_repository=("x",))
        self.service = kind.make(self.engine, self.others, settings)
        listener: Any = make_http_port(settings, cast(Any, None), cast(Any, self.service), dialect_of(settings))
        super().__init__(shared=cast(HttpShared, listener._config.http_protocol_class.shared))

    async def one(self, status: int = 200, body: bytes = b"{}", raw: bytes = b"") -> Answer:
        """Feed a request, answer it if it reaches a worker, and read the answer."""
        self.transport.written.clear()
        await self.fed(raw or self.kind.request_body())
        if self.engine.held:
            self.engine.answer(self.kind.reply(status, body))
        await turns()
        [answer] = self.answers
        return answer


def test_a_request_gets_the_answer_of_its_worker(kind: Kind) -> None:
    async def main() -> None:
        served = Served(kind)
        for status, body in ((200, b"first"), (418, b"second")):
            answer = await served.one(status, body)
            assert (answer.status, answer.body) == (status, body)

    run(main)


def test_a_malformed_answer_in_a_delivery_fails_only_its_own_request(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        first = Served(kind)
        second, third = Served(kind, first.engine), Served(kind, first.engine)
        for served in (first, second, third):
            await served.fed(kind.request_body())
        first.engine.answer(kind.reply(200, b"1"), b"junk", kind.reply(200, b"3"))

        assert (first.bodies, second.statuses, third.bodies) == ([b"1"], [500], [b"3"])
        assert (await second.one()).status == 200

    run(main)
    assert "request failed" in caplog.messages


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_is_sent_without_a_body(kind: Kind, status: int) -> None:
    async def main() -> None:
        served = Served(kind)
        answer = await served.one(status, b"body")
        assert (answer.status, answer.body) == (status, b"")
        assert (await served.one(200, b"next")).body == b"next"

    run(main)


@pytest.mark.parametrize("status", [0, 100, 199, 1000, 65535])
def test_an_invalid_status_is_an_internal_error(kind: Kind, status: int) -> None:
    async def main() -> None:
        assert (await Served(kind).one(status)).status == 500

    run(main)


def test_a_call_rejected_by_the_engine_is_reported_and_not_canceled(kind: Kind) -> None:
    async def main() -> None:
        served = Served(kind)
        served.engine.failure = InferError(Code.OVERLOADED, "full")
        answer = await served.one()
        assert (answer.status, "retry-after" in answer.headers) == (503, True)
        assert served.protocol.request is None
        served.transport.lose(None)
        await turns()
        assert served.engine.cancelled == []

    run(main)


def test_an_internal_error_is_logged_and_its_message_is_not_sent(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        served = Served(kind)
        served.engine.failure = RuntimeError("a secret")
        answer = await served.one()
        assert (answer.status, "retry-after" in answer.headers) == (500, False)
        assert b"secret" not in answer.body
        served.engine.failure = None
        assert (await served.one()).status == 200

    run(main)
    assert "a secret" in caplog.text


def test_a_large_request_that_will_be_rejected_is_rejected_before_its_body(kind: Kind) -> None:
    async def main() -> None:
        served = Served(kind)
        served.engine.refusal = InferError(Code.OVERLOADED, "full")
        assert (await served.one(raw=kind.request_body(100_000))).status == 503
        served.engine.refusal, served.engine.present, served.engine.generation = None, False, 2
        assert (await served.one(raw=kind.request_body(100_000))).status == 503
        assert not served.engine.held

    run(main)


def test_the_plan_of_a_request_is_cleared_when_its_client_disconnects(kind: Kind) -> None:
    async def main() -> None:
        served = Served(kind)
        await served.fed(kind.request_body())
        served.protocol.plan = object()  # as for a request whose outputs go to shared memory
        served.transport.lose(None)
        await turns()
        assert served.protocol.plan is None

    run(main)


def test_a_disconnect_cancels_the_call_and_discards_its_answer(kind: Kind) -> None:
    async def main() -> None:
        served = Served(kind)
        await served.fed(kind.request_body())
        [call] = served.engine.held
        served.transport.lose(None)
        await turns()
        assert served.engine.cancelled == [call]
        served.engine.answer(kind.reply(200, b"late"))
        assert served.answers == []

    run(main)


def test_a_late_answer_is_not_sent_for_the_next_request(kind: Kind) -> None:
    async def main() -> None:
        served = Served(kind)
        await served.fed(kind.request_body())
        [late] = served.engine.held
        served.engine.answer(kind.reply(200, b"first"))
        await served.fed(kind.request_body())
        late.sink.deliver([late])
        served.engine.answer(kind.reply(200, b"second"))
        assert served.bodies == [b"first", b"second"]

    run(main)


def test_restricted_calls_need_their_header(kind: Kind) -> None:
    async def main() -> None:
        allowed = kind.request_body().replace(b"host: x", b"host: x\r\nx-key: secret")
        for raw, status in ((kind.request_body(), 403), (allowed, 200)):
            served = Served(kind)
            served.service.restricted = RestrictedApis.parse(["inference:x-key=secret"])
            assert (await served.one(raw=raw)).status == status

    run(main)


def test_a_model_is_looked_up_again_when_the_engine_has_another(kind: Kind) -> None:
    async def main() -> None:
        served = Served(kind)
        served.engine.present = False
        assert (await served.one()).status == 503
        served.engine.present = True
        assert (await served.one()).status == 200
        served.engine.loaded, served.engine.generation = [fake_model()], 2
        await served.fed(kind.request_body())
        assert served.engine.held[0].model is served.engine.loaded[0]

    run(main)


@pytest.mark.parametrize("kind", [each for each in KINDS if each.dialect != "abeja"], ids=lambda kind: kind.dialect)
def test_penstocks_own_paths_are_passed_on(kind: Kind) -> None:
    async def main() -> None:
        served = Served(kind)
        own = b"POST /v2/repository/index HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
        assert (await served.one(raw=own)).body == b"own /v2/repository/index {}"
        served.others.full = True
        large = b"POST /v2/repository/index HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + b" " * 100_000
        assert (await served.one(raw=large)).body == b"full"

    run(main)
