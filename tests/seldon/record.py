"""Records the answers of seldon-core: scenarios/*.py -> cases/*.json.

Not run by the tests. With an environment that has seldon-core 1.17.1 on CPython 3.8 (numpy 1.24.4, Flask 2.2.5,
Werkzeug 2.2.3, protobuf 3.20.3, gunicorn 20.1.0), from the folder tests:

    /path/to/its/bin/python -m seldon.record [GROUP ...]

The server of each group is started, called in order, and ended. Only what does not change between runs is recorded:
no ports, process ids, dates or paths.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import grpc

from .replay import HOST, USUAL, play, text_of
from .scenarios.all_groups import GROUPS
from .scenarios.definitions import Group, RecordedRequest, Rest, Rpc

HERE = pathlib.Path(__file__).parent
CASES, COMPONENTS = HERE / "cases", HERE / "components"
_READY_WITHIN_S = 60


def written(request: RecordedRequest) -> dict[str, Any]:
    """Return a case as it is in the file, without its answer."""
    if isinstance(request, Rest):
        case: dict[str, Any] = {"name": request.name, "method": request.method, "path": request.path}
        if request.headers:
            case["headers"] = request.headers
        if request.body:
            case.update(text_of(request.body, "body"))
        if request.port != "http":
            case["port"] = request.port
        if request.unread:
            case["unread"] = True
        return case
    if not isinstance(request, Rpc):
        raise TypeError(request)
    message = request.message if isinstance(request.message, bytes) else _encoded(request)
    return {
        "name": request.name,
        "rpc": request.method,
        "said": _message_json(request),
        "message": base64.b64encode(message).decode(),
    }


def _message_json(request: Rpc) -> Any:
    return None if isinstance(request.message, bytes) else request.message


def _types(method: str) -> Any:
    from google.protobuf import message_factory, wrappers_pb2  # noqa: F401 - types that an Any may hold
    from seldon_core.proto import prediction_pb2

    _, service, name = method.rsplit(".", 1)[0], *method.rsplit(".", 1)[1].split("/")
    found = prediction_pb2.DESCRIPTOR.services_by_name[service].methods_by_name[name]
    make = message_factory.MessageFactory().GetPrototype
    return make(found.input_type), make(found.output_type)


def _encoded(request: Rpc) -> bytes:
    from google.protobuf import json_format

    message = json_format.ParseDict(request.message, _types(request.method)[0]())
    encoded: bytes = message.SerializeToString(deterministic=True)
    return encoded


def _readable(method: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return a message as JSON, for readers of the file, and its bytes with sorted maps."""
    if "message" not in answer:
        return answer
    from google.protobuf import json_format

    message = _types(method)[1].FromString(base64.b64decode(answer["message"]))
    answer["message"] = base64.b64encode(message.SerializeToString(deterministic=True)).decode()
    with contextlib.suppress(json_format.SerializeToJsonError, ValueError):
        answer["said"] = json.loads(json.dumps(json_format.MessageToDict(message), sort_keys=True))
    return answer


def _brief(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "headers" or value != USUAL}


@contextlib.contextmanager
def served(group: Group, log: Any) -> Iterator[dict[str, Any]]:
    """Run seldon-core for one group."""
    ports = {name: _free_port() for name in ("http", "grpc", "metrics")}
    command = [sys.executable, "-m", "seldon_core.microservice", group.component, *group.arguments]
    named = {f"PREDICTIVE_UNIT_{name.upper()}_SERVICE_PORT": str(port) for name, port in ports.items()}
    environment = dict(
        {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}, **named, **group.environment
    )
    child = subprocess.Popen(
        command, cwd=str(COMPONENTS), env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        _await_port(ports["http"], child)
        _await_port(ports["metrics"], child)
        with grpc.insecure_channel(f"{HOST}:{ports['grpc']}") as channel:
            grpc.channel_ready_future(channel).result(_READY_WITHIN_S)
            yield dict(ports, grpc=channel)
    finally:
        os.killpg(child.pid, signal.SIGTERM)  # the session started for this server, and nothing else
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
    return port


def _await_port(port: int, child: Any) -> None:
    end = time.monotonic() + _READY_WITHIN_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
            return
        if child.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{child.args} does not serve")
        time.sleep(0.05)


def record(group: Group) -> None:
    """Send one server all requests of its group, and write the file."""
    lines = []
    with tempfile.TemporaryFile() as log:
        try:
            with served(group, log) as ports:
                for request in group.requests:
                    case = written(request)
                    answer = play(case, ports)
                    case["answer"] = _readable(request.method, answer) if isinstance(request, Rpc) else _brief(answer)
                    lines.append(json.dumps(case, sort_keys=False))
        except Exception:
            log.seek(0)
            sys.stderr.buffer.write(log.read()[-5000:])
            raise
    names = [request.name for request in group.requests]
    if len(set(names)) != len(names):
        raise RuntimeError(f"{group.name}: {sorted(name for name in names if names.count(name) > 1)}")
    head = {"component": group.component, "environment": group.environment, "arguments": group.arguments}
    text = json.dumps(head)[:-1] + ',\n"cases": [\n' + ",\n".join(lines) + "\n]}\n"
    (CASES / f"{group.name}.json").write_text(text, "utf-8")


def main() -> None:
    """Record the named groups, or all."""
    for group in GROUPS:
        if not sys.argv[1:] or group.name in sys.argv[1:]:
            record(group)
            print(group.name, len(group.requests), flush=True)  # noqa: T201 - a command


if __name__ == "__main__":
    main()
