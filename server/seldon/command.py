"""The command line of `seldon-core-microservice` and the variables it reads, as settings. Called by cli.py.

Source: seldon-core 1.17.1, microservice.py: names, defaults, rejected values and their exit statuses.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.server.options.own_flags import parse_own_flags
from penstock.server.options.setting import PREFIX
from penstock.server.settings import SettingError, Settings, resolve

from .environ import read_boolean

NAME = "seldon-core-microservice"
ANNOTATIONS = Path("/etc/podinfo/annotations")
REST_TIMEOUT, GRPC_SIZE = "seldon.io/rest-timeout", "seldon.io/grpc-max-message-size"
TIMEOUT_S = 5000
"""Seconds after which the original's server killed a process that had not answered; large because the original does not
convert its unit."""
KEEPALIVE_S = 2
"""The original's default, which had no effect: its server closed the connection after every answer."""
UNKNOWN_STATUS, FAILED_STATUS = 255, 1
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - what a container's command listens on
_TYPES = ("MODEL", "ROUTER", "TRANSFORMER", "COMBINER", "OUTLIER_DETECTOR")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_LEVEL_NUMBERS = {
    "CRITICAL": 50,
    "FATAL": 50,
    "ERROR": 40,
    "WARNING": 30,
    "WARN": 30,
    "INFO": 20,
    "DEBUG": 10,
    "NOTSET": 0,
}
_EPILOG = "Every flag of `penstock serve` is accepted too; --batching means --seldon-batching. See docs/seldon.md."
_ALIASES = {"--batching": "--seldon-batching"}
_THREADS_REASON = "a process runs one call at a time; --workers starts more processes"


@dataclass(frozen=True, slots=True)
class SeldonCommand:
    """What a command line requests. `notes` describe options that have no effect here. `pidfile` is "" for none."""

    settings: Settings
    pidfile: str = ""
    notes: list[str] = field(default_factory=list)


class _Environment:
    """The variables that the original reads. Raises: SettingError for a value it could not parse."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def number(self, name: str, default: int) -> int:
        text = self.environ.get(name, str(default))
        try:
            return int(text)
        except ValueError:
            raise SettingError(f"{name} must be a whole number, not {text!r}") from None

    def read_boolean(self, name: str, *, default: bool = False) -> bool:
        value = read_boolean(self.environ, name)
        return default if value is None else value


def run(argv: Sequence[str], serve: Callable[[Settings], int]) -> int:
    """Serve what a command line requests. Returns: the exit status. Raises: SystemExit for an invalid command line."""
    try:
        command = parse_command(argv, os.environ, Path.cwd())
    except SettingError as error:
        _print_message(str(error))
        return FAILED_STATUS
    for note in command.notes:
        _print_message(note)
    with _pidfile(command.pidfile):
        return serve(command.settings)


def parse_command(
    argv: Sequence[str], environ: Mapping[str, str], folder: Path, annotations: Path = ANNOTATIONS
) -> SeldonCommand:
    """Parse a command line. `folder` is the working folder, which has the component.

    The command line overrides PENSTOCK_ variables, which override the original's.
    Raises: SettingError; SystemExit with the original's status for arguments that it rejected.
    """
    variables = _Environment(environ)
    parser = _parser(variables)
    actions = parser._actions  # noqa: SLF001
    penstock_flags, arguments = parse_own_flags(
        NAME, argv, {option for action in actions for option in action.option_strings}, _ALIASES
    )
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        _print_message(f"Unknown args {unknown}. Note since 1.5.0 this CLI does not take API type (REST, GRPC)")
        raise SystemExit(UNKNOWN_STATUS)
    for action in actions:  # so that the second parse returns only what was given, even if equal to the default
        action.default = argparse.SUPPRESS
    explicit = vars(parser.parse_known_args(arguments)[0])
    settings = _settings(given, variables, _annotations(annotations))
    flags: dict[str, str | Sequence[str]] = {}
    defaults: dict[str, str] = {}
    for name, (source, value) in settings.items():
        if source in explicit:
            flags[name] = value
        else:
            defaults[PREFIX + name.upper()] = value
    flags |= penstock_flags
    # this command decides what is served
    flags |= {"dialect": "seldon", "model_repository": [str(folder)], "seldon_component": given.interface_name}
    return SeldonCommand(resolve(flags, {**defaults, **environ}), given.pidfile or "", list(_notes(given)))


def _parser(variables: _Environment) -> argparse.ArgumentParser:
    """Make the original's parser: it also accepts prefixes of flags, and reads `--debug false` as true."""
    parser = argparse.ArgumentParser(prog=NAME, epilog=_EPILOG)
    text, number = variables.environ.get, variables.number
    parser.add_argument("interface_name", help="the component: Name or package.module.Class")
    parser.add_argument("--service-type", choices=_TYPES, default="MODEL", help="has no effect")
    parser.add_argument("--persistence", nargs="?", default=0, const=1, type=int, help="has no effect")
    parser.add_argument(
        "--parameters", default=text("PREDICTIVE_UNIT_PARAMETERS", "[]"), help="its constructor's parameters"
    )
    parser.add_argument("--log-level", choices=_LEVELS, default="INFO", help="log level")
    parser.add_argument("--pidfile", help="file for the process id")
    for flag, name, help_text in (
        ("--debug", "SELDON_DEBUG", "log every request"),
        ("--access-log", "GUNICORN_ACCESS_LOG", "log every request"),
    ):
        parser.add_argument(
            flag, nargs="?", type=bool, default=variables.read_boolean(name), const=True, help=help_text
        )
    tracing = number("TRACING", 0)
    parser.add_argument("--tracing", nargs="?", type=int, default=tracing, const=1, help="has no effect")
    for flag, name, default, help_text in (
        ("--workers", "GUNICORN_WORKERS", 1, "processes, each with its own copy of the component"),
        ("--threads", "GUNICORN_THREADS", 1, "has no effect"),
        ("--max-requests", "GUNICORN_MAX_REQUESTS", 0, "calls after which a process is replaced"),
        ("--max-requests-jitter", "GUNICORN_MAX_REQUESTS_JITTER", 0, "maximum random number of calls added to that"),
        ("--keepalive", "GUNICORN_KEEPALIVE", KEEPALIVE_S, "maximum idle time of a connection, in seconds"),
        ("--single-threaded", "FLASK_SINGLE_THREADED", 0, "has no effect"),
        ("--http-port", "PREDICTIVE_UNIT_HTTP_SERVICE_PORT", 9000, "port of REST"),
        ("--grpc-port", "PREDICTIVE_UNIT_GRPC_SERVICE_PORT", 5000, "port of gRPC"),
        ("--metrics-port", "PREDICTIVE_UNIT_METRICS_SERVICE_PORT", 6000, "port of the metrics"),
    ):
        parser.add_argument(flag, type=int, default=number(name, default), help=help_text)
    # parsed as arguments are, so that a wrong value is a usage error
    parser.add_argument("--grpc-threads", type=int, default=text("GRPC_THREADS", "1"), help="has no effect")
    parser.add_argument("--grpc-workers", type=int, default=text("GRPC_WORKERS", "1"), help="0: no gRPC")
    return parser


def _settings(
    given: argparse.Namespace, variables: _Environment, annotations: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return the settings: the argument each takes its value from ("" if it is none), and the value."""
    timeout_s: int = TIMEOUT_S
    if REST_TIMEOUT in annotations:
        timeout_s = _annotation_number(annotations, REST_TIMEOUT) // 1000 or 1
    access_log = given.access_log or given.debug
    settings = {
        "http_address": ("", ALL_ADDRESSES),
        "grpc_address": ("", ALL_ADDRESSES),
        "http_port": ("http_port", str(given.http_port)),
        "grpc_port": ("grpc_port", str(given.grpc_port)),
        "metrics_port": ("metrics_port", str(given.metrics_port)),
        "metrics_path": ("", variables.environ.get("PREDICTIVE_UNIT_METRICS_ENDPOINT", "/metrics")),
        "metrics_access_log": (
            "",
            _lower(not variables.read_boolean("FILTER_METRICS_ACCESS_LOGS", default=not given.debug)),
        ),
        "access_log": ("access_log" if given.access_log else "debug", _lower(access_log)),
        "allow_grpc": ("grpc_workers", _lower(int(given.grpc_workers) > 0)),
        "seldon_workers": ("workers", str(given.workers)),
        "seldon_parameters": ("parameters", given.parameters),
        "seldon_max_requests": ("max_requests", str(given.max_requests)),
        "seldon_max_requests_jitter": ("max_requests_jitter", str(given.max_requests_jitter)),
        "seldon_timeout_secs": ("", str(timeout_s)),
        **_log_settings(variables.environ.get("SELDON_LOG_LEVEL", given.log_level)),
    }
    if GRPC_SIZE in annotations:
        settings["grpc_max_message_bytes"] = ("", str(_annotation_number(annotations, GRPC_SIZE)))
    if given.keepalive != KEEPALIVE_S:
        settings["http_idle_timeout_secs"] = ("keepalive", str(max(0.01, given.keepalive)))
    return settings


def _log_settings(level_name: str) -> dict[str, tuple[str, str]]:
    """Return the log settings for a level. Raises: SettingError."""
    if level_name not in _LEVEL_NUMBERS:
        raise SettingError(f"Invalid log level: {level_name}")
    level = _LEVEL_NUMBERS[level_name]
    return {
        "log_verbose": ("log_level", str(int(level < _LEVEL_NUMBERS["INFO"]))),
        "log_info": ("log_level", _lower(level <= _LEVEL_NUMBERS["INFO"])),
        "log_warning": ("log_level", _lower(level <= _LEVEL_NUMBERS["WARNING"])),
        "log_error": ("log_level", _lower(level <= _LEVEL_NUMBERS["ERROR"])),
    }


def _notes(given: argparse.Namespace) -> Iterator[str]:
    """Describe the given options that have no effect."""
    if given.threads > 1 and not given.single_threaded:
        yield f"--threads has no effect: {_THREADS_REASON}"
    if int(given.grpc_workers) > 1 or int(given.grpc_threads) > 1:
        yield "--grpc-workers and --grpc-threads have no effect, except 0: gRPC and REST share the --workers"
    if given.tracing:
        yield "--tracing and JAEGER_* have no effect: use --trace-config instead (docs/tracing.md)"
    if given.persistence:
        yield "Persistence: ignored, persistence is deprecated"


def _annotations(path: Path) -> dict[str, str]:
    """Read a pod's annotations, `name="value"` lines; {} if there are none."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line.partition("=") for line in lines)
    return {name.strip(): value.strip()[1:-1] for name, equals, value in pairs if equals}


def _annotation_number(annotations: Mapping[str, str], name: str) -> int:
    try:
        return int(annotations[name])
    except ValueError:
        raise SettingError(f"annotation {name} must be a whole number, not {annotations[name]!r}") from None


def _print_message(text: str) -> None:
    sys.stderr.write(f"{NAME}: {text}\n")


def _lower(value: bool) -> str:
    return str(value).lower()


@contextlib.contextmanager
def _pidfile(pidfile: str) -> Iterator[None]:
    """Keep the process id in a file for the duration of the block."""
    if pidfile:
        Path(pidfile).write_text(f"{os.getpid()}\n", "utf-8")
    try:
        yield
    finally:
        if pidfile:
            Path(pidfile).unlink(missing_ok=True)
