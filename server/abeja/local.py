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

from .localserver import LocalServer, LocalServerError, print_line

FAILED_STATUS, USAGE_STATUS = 1, 2
_DEVICES = ("x86_cpu", "x86_gpu", "jetson_tx2", "raspberry3")
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif")
_VARIABLE = "^[a-zA-Z_][a-zA-Z0-9_]*$"
_MAX_PORT = 65535
_REQUIRED = {
    "handler": '"-h" / "--handler"',
    "image": '"-i" / "--image"',
    "input": '"--input"',
}


class _CommandError(Exception):
    """Why the command fails, as printed."""


class _Parser(argparse.ArgumentParser):
    """argparse, with the messages of the original."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            USAGE_STATUS, f'Usage: {self.prog} [OPTIONS]\nTry "{self.prog} --help" for help.\n\nError: {message}\n'
        )


def run_local(argv: Sequence[str]) -> int:
    """Run the words after `abeja model`. Returns: the exit status. Raises: SystemExit (2) for wrong usage."""
    command = argv[0] if argv else ""
    if command not in ("run-local", "run-local-server"):
        sys.stderr.write(f'Error: no such command: {command!r}: there are "run-local" and "run-local-server"\n')
        return USAGE_STATUS
    arguments = _parse_arguments(command, argv[1:])
    try:
        if command == "run-local":
            _run_once(arguments)
        else:
            _serve(arguments)
    except _CommandError as error:
        print(f"[error] {error}", file=sys.stderr)
        return FAILED_STATUS
    except LocalServerError as error:
        print(f"[error] {error}\n\n ------ Local Server Error ------ ", file=sys.stderr)
        print(*error.log, sep="\n", file=sys.stderr)
        return FAILED_STATUS
    except KeyboardInterrupt:
        print("\nAborted!", file=sys.stderr)
        return FAILED_STATUS
    return 0


def _parse_arguments(command: str, words: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog=f"penstock abeja model {command}", add_help=False, allow_abbrev=False)
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
    if command == "run-local":
        parser.add_argument("--input", help="JSON or image file to post")
        parser.add_argument("-q", "--quiet", action="store_true", help="print only the response")
    else:
        parser.add_argument("-p", "--port", help="port of the server (default: any free port)")
    arguments, unknown = parser.parse_known_args(words)
    for argument in unknown:
        parser.error(
            f"no such option: {argument.partition('=')[0]}"
            if argument.startswith("-")
            else f"Got unexpected extra argument ({argument})"
        )
    for name, options in _REQUIRED.items():
        if getattr(arguments, name, "") is None:
            parser.error(f"Missing option {options}.")
    if arguments.device_type not in _DEVICES:
        options = '"-d" / "--device_type" / "--device-type"'
        parser.error(
            f"Invalid value for {options}: invalid choice: {arguments.device_type}. (choose from {', '.join(_DEVICES)})"
        )
    for variable in arguments.environment:
        if not re.match(_VARIABLE, variable.partition(":")[0]):
            parser.error(
                f'Invalid value for "-e" / "--environment": {variable} is not a valid environment variable, '
                f"environment variable name should be {_VARIABLE}"
            )
    if getattr(arguments, "port", None) is not None and not (
        arguments.port.isdecimal() and 0 < int(arguments.port) <= _MAX_PORT
    ):
        parser.error(f'Invalid value for "-p" / "--port": {arguments.port} must be number in 1 - {_MAX_PORT}')
    return arguments


def _make_server(arguments: argparse.Namespace, *, quiet: bool) -> LocalServer:
    """Make the server, and report progress. Raises: _CommandError."""
    image = (
        arguments.image.replace("abeja-inc/", "abeja/", 1)
        if arguments.image.startswith("abeja-inc/")
        else arguments.image
    )
    _report(quiet, f"preparing image : {image}")
    if image.count(":") != 1:
        raise _CommandError(f"invalid image and tag format : {image}")
    arguments.image = image
    _report(quiet, "building image")
    _report(quiet, "setting up local server")
    variables = dict(each.partition(":")[::2] for each in arguments.environment)
    environment = {"ABEJA_TRAINING_RESULT_DIR": ".", **variables, "HANDLER": arguments.handler, "SERVICE_TYPE": "HTTP"}
    environment["PYTHONUNBUFFERED"] = "x"
    if arguments.organization_id is not None:
        environment["ABEJA_ORGANIZATION_ID"] = arguments.organization_id
    return LocalServer(arguments.handler, getattr(arguments, "port", None) or "0", {**os.environ, **environment})


def _run_once(arguments: argparse.Namespace) -> None:
    quiet: bool = arguments.quiet
    server = _make_server(arguments, quiet=quiet)
    content_type, body = _read_input(arguments.input)
    with server.running(echo=not quiet):
        _report(quiet, "waiting server running")
        server.wait_ready()
        _report(quiet, "sending request to model")
        answer = server.post(content_type, body)
    _report(quiet, "finish requesting to model")
    with contextlib.suppress(ValueError):  # it is not JSON
        answer = json.dumps(json.loads(answer), indent=4).encode()
    sys.stdout.flush()
    sys.stdout.buffer.write(answer + b"\n")
    sys.stdout.buffer.flush()


def _read_input(name: str) -> tuple[str, bytes]:
    """Return the content type of the file, and what is posted of it. Raises: _CommandError."""
    path, (kind, _) = Path(name), mimetypes.guess_type(name)
    if not path.exists():
        raise _CommandError(f"specifield file doesn't exist {name}: ")
    if kind == "application/json":
        try:
            return kind, json.dumps(json.loads(path.read_text("utf-8"))).encode()
        except ValueError as error:
            raise _CommandError(f"{name} is not JSON: {error}") from None
    if kind in _IMAGE_TYPES:
        return str(kind), path.read_bytes()
    raise _CommandError(f"not supported {name}: ")


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


def _serve(arguments: argparse.Namespace) -> None:
    server = _make_server(arguments, quiet=False)
    with server.running(echo=True):
        _report(False, "waiting server running")
        server.wait_ready()
        # in one write, since another thread prints the server's log meanwhile
        print(
            _STARTED.format(endpoint=server.endpoint, handler=arguments.handler, image=arguments.image),
            end="",
            flush=True,
        )
        server.wait_end()


def _report(quiet: bool, text: str) -> None:
    if not quiet:
        print_line(f"[info] {text}")
