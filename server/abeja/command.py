"""The command line of `penstock abeja`, and the variables of the original, as settings. Called by cli.py.

Source: abeja-platform-model-proxy 2.6.5: the variables, and their defaults. It had no arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from penstock.server.options.own_flags import parse_own_flags
from penstock.server.options.setting import PREFIX
from penstock.server.settings import SettingError, Settings, resolve

NAME = "penstock abeja"
FAILED_STATUS = 1
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - what a container listens on
_PORTS = {"http_port": ("PORT", "5000"), "abeja_health_port": ("HEALTHCHECK_PORT", "5001")}
_FLAGS = {"handler": "abeja_handler", "port": "http_port", "health_port": "abeja_health_port"}
_EPILOG = (
    "Every flag of `penstock serve` is accepted too. `penstock abeja model run-local` and `run-local-server` work like "
    "those of the platform's command line, without Docker. See docs/abeja.md."
)


def run(argv: Sequence[str], serve: Callable[[Settings], int]) -> int:
    """Run what a command line requests. Returns: the exit status. Raises: SystemExit for an invalid command line."""
    if list(argv[:1]) == ["model"]:
        from .local import run_local

        return run_local(argv[1:])
    try:
        settings = parse_settings(argv, os.environ)
    except SettingError as error:
        sys.stderr.write(f"{NAME}: {error}\n")
        return FAILED_STATUS
    return serve(settings)


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Parse a command line. It overrides PENSTOCK_ variables, which override the original's.

    Raises: SettingError; SystemExit (2) for unknown arguments.
    """
    parser = argparse.ArgumentParser(prog=NAME, epilog=_EPILOG)
    parser.add_argument("folder", nargs="?", help="folder of the handler (default: the current one)")
    parser.add_argument("--handler", metavar="MODULE:NAME", help="default: HANDLER, or main:handler")
    parser.add_argument("--port", help="port of requests (default: PORT, or 5000)")
    parser.add_argument("--health-port", help="port of /health_check (default: HEALTHCHECK_PORT, or 5001)")
    own_options = {option for action in parser._actions for option in action.option_strings}  # noqa: SLF001
    serve_flags, arguments = parse_own_flags(NAME, argv, own_options)
    namespace = parser.parse_args(arguments)
    defaults = {
        PREFIX + "HTTP_ADDRESS": ALL_ADDRESSES,
        PREFIX + "ALLOW_GRPC": str("grpc_port" in serve_flags).lower(),
        PREFIX + "ALLOW_METRICS": str("metrics_port" in serve_flags).lower(),
    }
    for name, (variable, default) in _PORTS.items():
        defaults[PREFIX + name.upper()] = environ.get(variable) or default
    values = vars(namespace)
    if namespace.handler is not None and namespace.handler.count(":") != 1:
        raise SettingError(f"--handler {namespace.handler!r}: it must be module:name, with one colon")
    flags = {name: values[flag] for flag, name in _FLAGS.items() if values[flag] is not None}
    flags |= {**serve_flags, "dialect": "abeja"}
    if namespace.folder:
        flags["model_repository"] = [namespace.folder]
    settings = resolve(flags, {**defaults, **environ})
    if settings.http_port == settings.abeja_health_port != 0:
        raise SettingError(f"--port and --health-port are both {settings.http_port}: they must be different")
    return settings
