"""`abeja model run-local` and `run-local-server`: serve and call the handler in the current folder, without Docker.

Source: abeja-platform-cli 2.1.0: options, what is printed where, and exit statuses. Called by command.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mimetypes
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .localserver import FailedError, LocalServer, say

FAILED_STATUS, USAGE_STATUS = 1, 2
_DEVICES = ("x86_cpu", "x86_gpu", "jetson_tx2", "raspberry3")
_PICTURES = ("image/jpeg", "image/png", "image/gif")
_VARIABLE = "^[a-zA-Z_][a-zA-Z0-9_]*$"
_MOST_PORT = 65535
_REQUIRED = {
    "handler": '"-h" / "--handler"',
    "image": '"-i" / "--image"',
    "input": '"--input"',
}


class _ToldError(Exception):
    """Why the command fails, as printed."""


class _Parser(argparse.ArgumentParser):
    """argparse, with the messages of the original."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            USAGE_STATUS, f'Usage: {self.prog} [OPTIONS]\nTry "{self.prog} --help" for help.\n\nError: {message}\n'
        )


def run_local(argv: Sequence[str]) -> int:
    """Run the words after `abeja model`. Returns: the exit status. Raises: SystemExit (2) for wrong usage."""
    word = argv[0] if argv else ""
    if word not in ("run-local", "run-local-server"):
        sys.stderr.write(f'Error: no such command: {word!r}: there are "run-local" and "run-local-server"\n')
        return USAGE_STATUS
    given = _read(word, argv[1:])
    try:
        if word == "run-local":
            _call(given)
        else:
            _serve(given)
    except _ToldError as error:
        print(f"[error] {error}", file=sys.stderr)
        return FAILED_STATUS
    except FailedError as error:
        print(f"[error] {error}\n\n ------ Local Server Error ------ ", file=sys.stderr)
        print(*error.log, sep="\n", file=sys.stderr)
        return FAILED_STATUS
    except KeyboardInterrupt:
        print("\nAborted!", file=sys.stderr)
        return FAILED_STATUS
    return 0


def _read(word: str, words: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog=f"penstock abeja model {word}", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", action="help", help="show this help")
    parser.add_argument("-h", "--handler", help="module:function")
    parser.add_argument("-i", "--image", help="NAME:TAG of the original image; the handler runs in this Python")
    parser.add_argument("-d", "--device_type", "--device-type", default=_DEVICES[0], help="has no effect")
    parser.add_argument(
        "-e", "--environment", action="append", default=[], metavar="KEY:VALUE", help="an environment variable"
    )
    parser.add_argument("-o", "--organization_id", "--organization-id", help="value of ABEJA_ORGANIZATION_ID")
    parser.add_argument("--no_cache", "--no-cache", action="store_true", help="has no effect")
    parser.add_argument("--v1", action="store_true", help="has no effect")
    if word == "run-local":
        parser.add_argument("--input", help="JSON or image file to post")
        parser.add_argument("-q", "--quiet", action="store_true", help="print only the response")
    else:
        parser.add_argument("-p", "--port", help="port of the server (default: any free port)")
    given, others = parser.parse_known_args(words)
    for other in others:
        parser.error(
            f"no such option: {other.partition('=')[0]}"
            if other.startswith("-")
            else f"Got unexpected extra argument ({other})"
        )
    for name, options in _REQUIRED.items():
        if getattr(given, name, "") is None:
            parser.error(f"Missing option {options}.")
    if given.device_type not in _DEVICES:
        options = '"-d" / "--device_type" / "--device-type"'
        parser.error(
            f"Invalid value for {options}: invalid choice: {given.device_type}. (choose from {', '.join(_DEVICES)})"
        )
    for said in given.environment:
        if not re.match(_VARIABLE, said.partition(":")[0]):
            parser.error(
                f'Invalid value for "-e" / "--environment": {said} is not a valid environment variable, '
                f"environment variable name should be {_VARIABLE}"
            )
    if getattr(given, "port", None) is not None and not (given.port.isdecimal() and 0 < int(given.port) <= _MOST_PORT):
        parser.error(f'Invalid value for "-p" / "--port": {given.port} must be number in 1 - {_MOST_PORT}')
    return given


def _server(given: argparse.Namespace, *, quiet: bool) -> LocalServer:
    """Make the server, and report progress. Raises: _ToldError."""
    image = given.image.replace("abeja-inc/", "abeja/", 1) if given.image.startswith("abeja-inc/") else given.image
    _tell(quiet, f"preparing image : {image}")
    if image.count(":") != 1:
        raise _ToldError(f"invalid image and tag format : {image}")
    given.image = image
    _tell(quiet, "building image")
    _tell(quiet, "setting up local server")
    said = dict(each.partition(":")[::2] for each in given.environment)
    environment = {"ABEJA_TRAINING_RESULT_DIR": ".", **said, "HANDLER": given.handler, "SERVICE_TYPE": "HTTP"}
    environment["PYTHONUNBUFFERED"] = "x"
    if given.organization_id is not None:
        environment["ABEJA_ORGANIZATION_ID"] = given.organization_id
    return LocalServer(given.handler, getattr(given, "port", None) or "0", {**os.environ, **environment})


def _call(given: argparse.Namespace) -> None:
    quiet: bool = given.quiet
    server = _server(given, quiet=quiet)
    content_type, body = _input(given.input)
    with server.running(tells=not quiet):
        _tell(quiet, "waiting server running")
        server.await_ready()
        _tell(quiet, "sending request to model")
        answer = server.post(content_type, body)
    _tell(quiet, "finish requesting to model")
    with contextlib.suppress(ValueError):  # it is not JSON
        answer = json.dumps(json.loads(answer), indent=4).encode()
    sys.stdout.flush()
    sys.stdout.buffer.write(answer + b"\n")
    sys.stdout.buffer.flush()


def _input(name: str) -> tuple[str, bytes]:
    """Return the content type of the file, and what is posted of it. Raises: _ToldError."""
    path, (kind, _) = Path(name), mimetypes.guess_type(name)
    if not path.exists():
        raise _ToldError(f"specifield file doesn't exist {name}: ")
    if kind == "application/json":
        try:
            return kind, json.dumps(json.loads(path.read_text("utf-8"))).encode()
        except ValueError as error:
            raise _ToldError(f"{name} is no JSON: {error}") from None
    if kind in _PICTURES:
        return str(kind), path.read_bytes()
    raise _ToldError(f"not supported {name}: ")


_STARTED = """\
 ----- Local Server -----\x20
 Started successfully!

 Endpoint : {endpoint}
 Handler :  {handler}
 Image :    {image}

 you can now access this http api!

 press Ctrl + C to stop
 ------------------------\x20
"""


def _serve(given: argparse.Namespace) -> None:
    server = _server(given, quiet=False)
    with server.running(tells=True):
        _tell(False, "waiting server running")
        server.await_ready()
        # in one write, since another thread prints the server's log meanwhile
        print(_STARTED.format(endpoint=server.endpoint, handler=given.handler, image=given.image), end="", flush=True)
        server.await_end()


def _tell(quiet: bool, text: str) -> None:
    if not quiet:
        say(f"[info] {text}")
