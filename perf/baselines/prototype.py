"""The prototype of design section 4: `python -m penstock.perf.baselines.prototype loop|thread MODEL PORT`.

The least Python that does the work: protocol classes on uvloop, for HTTP/1.1 with JSON or a binary tensor and for gRPC,
with one FP32 input, one FP32 output and one row a request. All requests of a loop turn run as one batch on the loop, or
up to CAP_ROWS waiting requests on a thread. There are no checks, names, limits, statistics, cancellation or errors, and
only requests like those of the benchmarks are understood. What Penstock costs beyond it in the same run is the cost of
all that.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import orjson
import uvloop
from hpack import Decoder

from penstock.server.grpc.framing import PREFIX
from penstock.server.http2 import frames
from penstock.server.protobuf import service_pb2

HOST = "127.0.0.1"
CAP_ROWS = 16
"""Of a batch on the thread: where mlp's time per row stops falling on the machine of the issues' figures."""
_READY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_BINARY = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n"
    b"inference-header-content-length: %d\r\ncontent-length: %d\r\n\r\n"
)
_HEADERS = b"\x88\x0f\x10\x10application/grpc"  # :status 200, content-type; literals that no table keeps (RFC 7541)
_TRAILERS = b"\x00\x0bgrpc-status\x010"
_HEADERS_WORD, _TRAILERS_WORD = (len(block) << 8 | frames.HEADERS for block in (_HEADERS, _TRAILERS))
_head, _prefix = frames.FRAME_HEADER.pack, PREFIX.pack

Answer = Callable[[Any], None]
"""Receives a request's row of the output."""


class Batcher:
    """Runs the requests that have arrived."""

    def __init__(self, model: str, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._run = session.run
        self._input = session.get_inputs()[0].name
        self.output = session.get_outputs()[0].name
        self.name = Path(model).parent.parent.name
        self._loop = asyncio.get_running_loop()
        self.flushes: list[Callable[[], None]] = []

    def add(self, row: Any, answer: Answer) -> None:
        """Take a request."""
        raise NotImplementedError

    def _infer(self, rows: list[Any]) -> Any:
        return self._run(None, {self._input: np.array(rows, np.float32)})[0]

    def _deliver(self, answers: list[Answer], outputs: Any) -> None:
        for answer, output in zip(answers, outputs, strict=True):
            answer(output)
        for flush in self.flushes:
            flush()
        self.flushes.clear()


class OnLoop(Batcher):
    """Runs all requests of a loop turn, on the loop."""

    def __init__(self, model: str) -> None:
        super().__init__(model, 1)
        self._rows: list[Any] = []
        self._answers: list[Answer] = []

    def add(self, row: Any, answer: Answer) -> None:
        if not self._rows:
            self._loop.call_soon(self._run_batch)
        self._rows.append(row)
        self._answers.append(answer)

    def _run_batch(self) -> None:
        rows, answers = self._rows, self._answers
        self._rows, self._answers = [], []
        self._deliver(answers, self._infer(rows))


class OnThread(Batcher):
    """Runs the waiting requests, on a thread."""

    def __init__(self, model: str) -> None:
        super().__init__(model, 2)
        self._waiting: deque[tuple[Any, Answer]] = deque()
        self._wakeup = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, row: Any, answer: Answer) -> None:
        with self._wakeup:
            self._waiting.append((row, answer))
            self._wakeup.notify()

    def _work(self) -> None:
        while True:
            with self._wakeup:
                while not self._waiting:
                    self._wakeup.wait()
                waiting = [self._waiting.popleft() for _ in range(min(CAP_ROWS, len(self._waiting)))]
            outputs = self._infer([row for row, _ in waiting])
            self._loop.call_soon_threadsafe(self._deliver, [answer for _, answer in waiting], outputs)


class Connection(asyncio.Protocol):
    """What both protocols share."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.received = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def write(self, data: bytes) -> None:
        """Send, unless the client has disconnected."""
        if not self.transport.is_closing():
            self.transport.write(data)


class Http1(Connection):
    """HTTP/1.1, or a connection whose protocol is not known yet. The answer is binary if the request is."""

    def data_received(self, data: bytes) -> None:
        data = self.received + data if self.received else data
        end = data.find(b"\r\n\r\n") + 4
        if data.startswith(frames.PREFACE[:4]):
            http2 = Http2(self.batcher)
            self.transport.set_protocol(http2)
            http2.connection_made(self.transport)
            http2.data_received(data[len(frames.PREFACE) :])
        elif data.startswith(b"GET"):
            self.transport.write(_READY)
        elif end < 4 or len(data) < end + _number(data, b"\r\ncontent-length:", end):
            self.received = data
        else:
            self.received = b""
            json_bytes = _number(data, b"\r\ninference-header-content-length:", end)
            if json_bytes:
                orjson.loads(data[end : end + json_bytes])
                self.batcher.add(np.frombuffer(data, np.float32, -1, end + json_bytes), self._answer_binary)
            else:
                self.batcher.add(orjson.loads(data[end:])["inputs"][0]["data"], self._answer_json)

    def _answer_json(self, output: Any) -> None:
        body = orjson.dumps(self._json_document(output, {"data": output.tolist()}))
        self.write(_JSON % len(body) + body)

    def _answer_binary(self, output: Any) -> None:
        head = orjson.dumps(self._json_document(output, {"parameters": {"binary_data_size": output.nbytes}}))
        self.write(_BINARY % (len(head), len(head) + output.nbytes) + head + output.tobytes())

    def _json_document(self, output: Any, extra_fields: dict[str, Any]) -> dict[str, Any]:
        tensor = {"name": self.batcher.output, "datatype": "FP32", "shape": [1, len(output)], **extra_fields}
        return {"model_name": self.batcher.name, "model_version": "1", "outputs": [tensor]}


def _number(data: bytes, name: bytes, end: int) -> int:
    """Return the value of a header field, or 0 if it is absent."""
    position = data[:end].lower().find(name)
    return int(data[position + len(name) : data.index(b"\r\n", position + len(name))]) if position >= 0 else 0


class Http2(Connection):
    """gRPC: ModelInfer, whatever method a call names. All answers of a batch to one connection leave in one write."""

    def __init__(self, batcher: Batcher) -> None:
        super().__init__(batcher)
        self._decoder = Decoder()
        self._known: set[bytes] = set()
        self._out: list[bytes] = []
        self._taken = 0
        self._kinds = service_pb2()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        values = {frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW, frames.MAX_CONCURRENT_STREAMS: 1024}
        window_increment = frames.MAX_WINDOW - frames.DEFAULT_WINDOW
        transport.write(frames.settings(values) + frames.window_update(0, window_increment))  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        data = self.received + data if self.received else data
        position, size = 0, len(data)
        while size - position >= frames.FRAME_HEADER_BYTES:
            size_and_type, flags, stream = frames.FRAME_HEADER.unpack_from(data, position)
            start = position + frames.FRAME_HEADER_BYTES
            end = start + (size_and_type >> 8)
            if end > size:
                break
            kind = size_and_type & 0xFF
            if kind == frames.DATA:
                self._call(stream, data[start + 5 : end])
            elif kind == frames.HEADERS:
                block = data[start:end]
                if block not in self._known:
                    self._decoder.decode(block)
                    self._known.add(block)
            elif kind in (frames.SETTINGS, frames.PING) and not flags & frames.ACK:
                payload = data[start:end] if kind == frames.PING else b""
                self.transport.write(frames.frame(kind, frames.ACK, 0, payload))
            position = end
        self.received = data[position:]

    def _call(self, stream: int, message: bytes) -> None:
        self._taken += len(message) + 5
        if self._taken > frames.MAX_WINDOW // 4:
            self._out.append(frames.window_update(0, self._taken))
            self._taken = 0
        if not message:
            return
        request = self._kinds.ModelInferRequest.FromString(message)
        row = np.frombuffer(request.raw_input_contents[0], np.float32)
        self.batcher.add(row, lambda output: self._answer(stream, request, output))

    def _answer(self, stream: int, request: Any, output: Any) -> None:
        answer = self._kinds.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        answer.outputs.add(name=self.batcher.output, datatype="FP32", shape=[1, len(output)])
        answer.raw_output_contents.append(output.tobytes())
        message = answer.SerializeToString()
        if not self._out:
            self.batcher.flushes.append(self._flush)
        size = len(message)
        self._out += (
            _head(_HEADERS_WORD, frames.END_HEADERS, stream), _HEADERS,
            _head(size + 5 << 8, 0, stream), _prefix(0, size), message,
            _head(_TRAILERS_WORD, frames.END_HEADERS | frames.END_STREAM, stream), _TRAILERS,
        )  # fmt: skip

    def _flush(self) -> None:
        self.write(b"".join(self._out))
        self._out.clear()


async def serve(where: str, model: str, port: int) -> None:
    """Answer until cancelled."""
    batcher = (OnLoop if where == "loop" else OnThread)(model)
    server = await asyncio.get_running_loop().create_server(lambda: Http1(batcher), HOST, port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    gc.freeze()
    uvloop.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
