"""A Python model's worker without its process: the service runs on a thread, and the test plays the server."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.backends.errors import InferError
from penstock.server.ipc.channel import Channel
from penstock.server.ipc.errors import read_error, write_error
from penstock.server.python_models.inside.service import open_service
from penstock.server.python_models.messages import ANSWER, CALL, CALL_ANSWER, CANCEL, CONTROL, CONTROL_RESULT, EXECUTE
from penstock.server.workers.kinds import CLOSE, ERROR, FIRST_MESSAGE, OPEN, REPLY

MODELS = Path(__file__).parent / "models"
GUARD_S = 30.0
Json = dict[str, Any]
WorkerMessage = tuple[int, int, Json, list[Any]]
Control = Callable[[Json, list[Any]], Json]
READY = {"error": None, "result": True}
Answers = Callable[[Json, list[Any]], Sequence[tuple[Json, list[Any]]]]


def file_of(name: str) -> Path:
    return MODELS / name / "1" / "model.py"


def settings_of(name: str, config: Json | None = None, file: Path | None = None) -> Json:
    file = file or file_of(name)
    defaults = {"name": name, "backend": "python", "max_batch_size": 0, "input": [], "output": []}
    args = {
        "model_config": json.dumps(defaults | (config or {})), "model_instance_kind": "CPU",
        "model_instance_name": f"{name}_0_0", "model_instance_device_id": "0",
        "model_repository": str(file.parents[1]), "model_version": "1", "model_name": name,
    }  # fmt: skip
    return {"file": str(file), "args": args, "complete": None}


def answer(outputs: Sequence[str] = (), *, final: bool = True, error: Json | None = None) -> Json:
    return {"outputs": list(outputs), "error": error, "parameters": {}, "final": final}


class WorkerLoop:
    """Does what the worker's loop does (server/workers/service.py), but the process continues when it ends."""

    def __init__(self, settings: Json, channel: Channel) -> None:
        self.service = open_service(settings, channel)
        self._channel = channel
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._listen, self._serve)]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                for kind, number, body, arrays, _ in self._channel.receive():
                    if kind < FIRST_MESSAGE:
                        self._calls.put((kind, number, body, arrays))
                    else:
                        self.service.on_message(kind, number, body, arrays)
        self._calls.put(None)

    def _serve(self) -> None:
        while (message := self._calls.get()) is not None:
            kind, number, body, arrays = message
            try:
                reply = self._run_call(kind, number, body, arrays)
            except InferError as error:
                self._channel.send(ERROR, number, write_error(error))
            else:
                self._channel.send(REPLY, number, *reply)

    def _run_call(self, kind: int, number: int, body: bytes, arrays: list[Any]) -> Any:
        if kind == OPEN:
            return self.service.on_open()
        if kind == CLOSE:
            self.service.close()
            return b"", None
        return self.service.call(kind, number, body, arrays)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(GUARD_S)
        self._channel.close()


class Stage:
    """The server's end. `messages` has the messages from the worker that are not handled here."""

    def __init__(
        self, name: str, config: Json | None = None, file: Path | None = None, on_control: Control = lambda *_: READY,
        **settings: Any,
    ) -> None:  # fmt: skip
        self._before = set(sys.modules), list(sys.path)
        self.server_channel, worker_channel = map(Channel, socket.socketpair())
        self._work = WorkerLoop(settings_of(name, config, file) | settings, worker_channel)
        self._number = 0
        self._replies: dict[int, tuple[int, bytes, list[Any]]] = {}
        self.messages: list[WorkerMessage] = []
        self.calls: list[tuple[Json, list[Any]]] = []
        self.on_call: Answers = lambda head, arrays: [(answer(["OUT"]), arrays)]
        self.on_control = on_control
        try:
            self.opened = self.reply(self.begin(OPEN, {}))[0]
        except InferError:
            self.close()
            raise

    def begin(self, kind: int, head: Json, arrays: Sequence[Any] = ()) -> int:
        self._number += 1
        self.server_channel.send(kind, self._number, json.dumps(head).encode(), list(arrays))
        return self._number

    def reply(self, number: int) -> tuple[Json, list[Any]]:
        self.until(lambda: number in self._replies)
        kind, body, arrays = self._replies.pop(number)
        if kind == ERROR:
            raise read_error(body)
        return json.loads(body or b"{}"), arrays

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GUARD_S
        while not condition():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            for kind, number, body, arrays, _ in self.server_channel.receive(remaining_s):
                self._handle_message(kind, number, body, arrays)

    def _handle_message(self, kind: int, number: int, body: bytes, arrays: list[Any]) -> None:
        if kind in {REPLY, ERROR}:
            self._replies[number] = (kind, body, arrays)
            return
        head = json.loads(body)
        if kind == CALL:
            self.calls.append((head, arrays))
            for answered, tensors in self.on_call(head, arrays):
                self.server_channel.send(CALL_ANSWER, number, json.dumps(answered).encode(), tensors)
        elif kind == CONTROL:
            self.server_channel.send(CONTROL_RESULT, number, json.dumps(self.on_control(head, arrays)).encode())
        else:
            self.messages.append((kind, number, head, arrays))

    def request(self, number: int = 1, inputs: Sequence[str] = (), **members: Any) -> Json:
        return {
            "id": "", "number": number, "inputs": list(inputs), "outputs": [], "correlation": 0, "flags": 0,
            "timeout_us": 0, "priority": 0, "parameters": {}, **members,
        }  # fmt: skip

    def execute(self, requests: Sequence[Json], arrays: Sequence[Any] = ()) -> tuple[list[Any], list[Any]]:
        head, output_arrays = self.reply(self.begin(EXECUTE, {"requests": list(requests)}, arrays))
        return head["answers"], output_arrays

    def execute_one(self, tensors: dict[str, Any] | None = None, **members: Any) -> tuple[Any, list[Any]]:
        """Execute one request, and return its answer."""
        tensors = tensors or {}
        answers, arrays = self.execute([self.request(1, list(tensors), **members)], list(tensors.values()))
        return answers[0], arrays

    def cancel(self, number: int) -> None:
        self.server_channel.send(CANCEL, number)

    def answers_to(self, number: int) -> list[tuple[Json, list[Any]]]:
        """Wait for the last answer that is sent to a request, and return all of them."""

        def answers() -> list[tuple[Json, list[Any]]]:
            return [(head, arrays) for kind, to, head, arrays in self.messages if kind == ANSWER and to == number]

        self.until(lambda: any(head["final"] for head, _ in answers()))
        return answers()

    def bodies_of(self, kind: int) -> list[Json]:
        return [head for what, _, head, _ in self.messages if what == kind]

    def finalize(self) -> None:
        self.reply(self.begin(CLOSE, {}))

    def close(self) -> None:
        self.server_channel.close()
        self._work.join()
        modules, path = self._before
        for name in set(sys.modules) - modules:
            if name.partition(".")[0] in {"1", "beside", "triton_python_backend_utils", "c_python_backend_utils"}:
                del sys.modules[name]
        sys.path[:] = path


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


Open = Callable[..., Stage]
