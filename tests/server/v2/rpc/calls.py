"""Helpers of the RPC tests: a Call without a connection, an Engine that answers on demand, and short messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.backends.backend import Array
from penstock.backends.errors import InferError
from penstock.batching.model import Model
from penstock.batching.request import RequestOptions
from penstock.server.errors import GRPC_STATUS, pushback_ms
from penstock.server.grpc.method import Method, Reader, Status
from penstock.server.health import Health
from penstock.server.hooks.generator_call import Answer
from penstock.server.listening.mapped_buffer import Body
from penstock.server.protobuf import service_pb2
from penstock.server.v2.rpc.services import RpcDependencies, methods
from tests.fakes import PATIENCE_S
from tests.server.v2.held_engine import ROW, HeldEngine

pb = service_pb2()
PREFIX = "/inference.GRPCInferenceService/"


@dataclass
class FakeCall:
    """A Call that keeps the messages sent on it."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    deadline_ns: int = 0
    context: Any = None
    on_cancel: Callable[[], None] | None = None
    ended: bool = False
    writable: bool = True
    sent: list[bytes] = field(default_factory=list)
    status: Status | None = None
    text: str = ""
    pushback_ms: int = 0
    errors: list[Status] = field(default_factory=list)
    reads: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, message: Body) -> None:
        self.send(message)
        self.finish()

    def send(self, message: Body) -> None:
        if not self.ended:
            self.sent.append(bytes(message))

    def finish(self) -> None:
        self._end(Status.OK, "")

    def count_error(self, status: Status) -> None:
        """Keep the message, too."""
        self.errors.append(status)

    def abort(self, status: Status, text: str, pushback_ms: int = 0) -> None:
        self.pushback_ms = pushback_ms
        self._end(status, text)

    async def drain(self) -> None:
        """Wait for `reads`; messages sent this way are not kept."""
        while not self.writable and not self.ended:
            self.reads.clear()
            await self.reads.wait()

    def lose(self) -> None:
        """End the call as the lane does when the client has disconnected."""
        cancelled, self.on_cancel = self.on_cancel, None
        self.ended = True
        if cancelled is not None:
            cancelled()

    def _end(self, status: Status, text: str) -> None:
        if not self.ended:
            self.ended, self.status, self.text = True, status, text


class FakeRepository:
    """A Repository whose models are ready unless the test says otherwise."""

    def __init__(self) -> None:
        self.is_ready = True

    def ready(self, strict: bool = True) -> bool:
        return self.is_ready

    def config(self, model: Model) -> Any:
        return {"name": model.name, "max_batch_size": 8}


class FakeHooks:
    """Hooks of a model that has none, or whose post_inference is `function`."""

    def __init__(self, function: Callable[[Mapping[str, Array]], dict[str, Array]] | None = None) -> None:
        self.has_pre = False
        self.has_post = function is not None
        self.parameters: Mapping[str, Any] | None = None
        self.decoupled: Callable[[Mapping[str, Array]], AsyncGenerator[Answer, None]] | None = None
        self._function = function

    async def stream(
        self, inputs: Mapping[str, Array], request_id: str, terms: RequestOptions, parameters: Mapping[str, Any] | None,
        positions: tuple[int, ...],
    ) -> AsyncGenerator[Answer, None]:  # fmt: skip
        assert self.decoupled is not None
        async with aclosing(self.decoupled(inputs)) as answers:
            async for each in answers:
                yield each

    async def infer(
        self, inputs: Mapping[str, Array], request_id: str, deadline_ns: int, parameters: Mapping[str, Any] | None
    ) -> dict[str, Array]:
        self.parameters = parameters
        if self._function is None:
            raise AssertionError("there are no hooks to run")
        return self._function(inputs)


class Services:
    """All methods over fakes."""

    def __init__(self, *models: Model, hooks: FakeHooks | None = None, **parts: Any) -> None:
        self.engine = HeldEngine(list(models)) if models else HeldEngine()
        self.repository = FakeRepository()
        self.health = Health(self.repository.ready, self.engine)
        self.hooks = hooks or FakeHooks()
        others: dict[str, Any] = dict.fromkeys(("control", "system", "cuda", "traces", "logs"))
        dependencies = RpcDependencies(
            engine=cast(Any, self.engine), repository=self.repository, health=self.health,
            hooks_of=lambda model: cast(Any, self.hooks), **(others | parts),
        )  # fmt: skip
        self.methods: dict[str, Method] = methods(dependencies)

    def call(
        self, name: str, message: Any, metadata: Mapping[str, str] | None = None, deadline_ns: int = 0
    ) -> FakeCall:
        """Begin a unary call as the lane does."""
        call = FakeCall(metadata or {}, deadline_ns)
        method = self.methods[name if name.startswith("/") else PREFIX + name]
        assert method.unary is not None
        try:
            method.unary(call, message if type(message) is bytes else message.SerializeToString())
        except InferError as error:
            call.abort(GRPC_STATUS[error.code], error.message, pushback_ms(error))
        return call

    def open(
        self, name: str = "ModelStreamInfer", metadata: Mapping[str, str] | None = None
    ) -> tuple[FakeCall, Reader]:
        """Open a stream."""
        call = FakeCall(metadata or {})
        method = self.methods[name if name.startswith("/") else PREFIX + name]
        assert method.streaming is not None
        return call, method.streaming(call)

    def ask(self, name: str, message: Any) -> Any:
        """Make a unary call that is answered immediately, and return the message of the answer."""
        call = self.call(name, message)
        assert call.status is Status.OK, call.text
        method = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[name]
        return getattr(pb, method.output_type.name).FromString(call.sent[0])


def request(array: Array = ROW, name: str = "x", datatype: str = "FP32", **members: Any) -> Any:
    """Make a ModelInferRequest with one raw input."""
    message = pb.ModelInferRequest(**({"model_name": "m"} | members))
    message.inputs.add(name=name, datatype=datatype, shape=array.shape)
    message.raw_input_contents.append(array.tobytes())
    return message


def answer(call: FakeCall, position: int = 0) -> Any:
    """Parse the answer to a ModelInfer call."""
    return pb.ModelInferResponse.FromString(call.sent[position])


def stream_answers(call: FakeCall) -> list[tuple[str, str, bytes]]:
    """Return the answers of a stream: error text, id and first raw output of each."""
    found = []
    for message in call.sent:
        each = pb.ModelStreamInferResponse.FromString(message)
        raws: Sequence[bytes] = each.infer_response.raw_output_contents
        assert each.infer_response.parameters["triton_final_response"].bool_param
        found.append((each.error_message, each.infer_response.id, raws[0] if raws else b""))
    return found


async def turns(count: int = 20) -> None:
    """Let the event loop run for some turns."""
    for _ in range(count):
        await asyncio.sleep(0)


async def settled() -> None:
    """Wait for the running tasks."""
    async with asyncio.timeout(PATIENCE_S):
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.gather(*tasks, return_exceptions=True)
    await turns()
