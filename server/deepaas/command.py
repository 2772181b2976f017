"""The command line of `deepaas-run`, its variables and its configuration files, as settings. Called by cli.py.

Source: deepaas 2.6.0, config.py and cmd/run.py, on oslo.config 9 and oslo.log: names, defaults, precedence.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.server.options.own_flags import parse_own_flags
from penstock.server.options.setting import PREFIX
from penstock.server.settings import SettingError, Settings, resolve

from .ini import default_files, default_folders, files_in, read_ini, substitute
from .options import BY_NAME, OPTIONS, VERSION

NAME = "deepaas-run"
FAILED_STATUS = 1
ANY_SIZE = 2**40
"""Bytes of a body, if there is no limit."""
RECEIVE_S = 3600
"""Time for a request to arrive: the original has no limit, and files may be large."""
_EPILOG = (
    "NAME=package.module[:attr] is a model that need not be installed. Every flag of `penstock serve` is accepted too."
)
_STREAM = "logs go to stderr, one line each: redirect it"
_NO_EFFECT = {
    "log_config_append": "--log-format, --log-verbose and --log-info say what is logged",
    "log_date_format": "times are in ISO 8601",
    "log_dir": _STREAM,
    "log_file": _STREAM,
    "watch_log_file": _STREAM,
    "use_syslog": _STREAM,
    "use_journal": _STREAM,
    "syslog_log_facility": _STREAM,
    "openwhisk_detect": "models are served only over HTTP",
}


@dataclass(frozen=True, slots=True)
class DeepaasCommand:
    """What a command line requests. `notes` describe options that have no effect here."""

    settings: Settings
    notes: list[str] = field(default_factory=list)


def run(argv: Sequence[str], serve: Callable[[Settings], int]) -> int:
    """Serve what a command line requests. Returns: the exit status. Raises: SystemExit for an invalid command line."""
    try:
        command = parse(argv, os.environ)
    except SettingError as error:
        sys.stderr.write(f"{error}\n")
        return FAILED_STATUS
    for note in command.notes:
        sys.stderr.write(f"{NAME}: {note}\n")
    return serve(command.settings)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> DeepaasCommand:
    """Parse a command line. It overrides PENSTOCK_ variables, which override the original's variables and files.

    Raises: SettingError; SystemExit (2) for unknown arguments, (0) for --help and --version.
    """
    parser = make_parser()
    original_flags = {option for action in parser._actions for option in action.option_strings}  # noqa: SLF001
    ours, rest = parse_own_flags(NAME, argv, original_flags)
    parsed = parser.parse_intermixed_args(rest)
    values = OptionValues(parsed.options, environ)
    flags: dict[str, Any] = {}
    defaults: dict[str, str] = {}
    for name, value in _settings(values):
        option = _OPTION_OF.get(name, "")
        if option in values.flags:
            flags[name] = value
        else:
            defaults[PREFIX + name.upper()] = value
    defaults[PREFIX + "ALLOW_GRPC"] = _bool_text("grpc_port" in ours)
    defaults[PREFIX + "ALLOW_METRICS"] = _bool_text("metrics_port" in ours)
    flags |= {**ours, "dialect": "deepaas"}
    paths = [*parsed.models, *ours.get("model_repository", ())]
    if paths:
        flags["model_repository"] = paths
    return DeepaasCommand(resolve(flags, {**defaults, **environ}), [*values.notes, *_notes(values)])


class OptionValues:
    """The options that are set, by their names with `_`. `flags` are those set by a flag of the command line.

    Raises: SettingError for files that cannot be read.
    """

    def __init__(self, options: Sequence[tuple[str, str]], environ: Mapping[str, str], program: str = NAME) -> None:
        self.notes: list[str] = []
        self.flags: set[str] = set()
        self._texts: dict[str, str] = {}
        self._resolving: list[str] = []
        named = {name for name, _ in options}
        if "config_file" not in named:
            self._read_files(default_files(environ, program))
        if "config_dir" not in named:
            for folder in default_folders(environ, program):
                self._read_files(files_in(folder))
        # later words of the command line override earlier ones, whether options or files
        for name, text in options:
            if name == "config_file":
                self._read_files([Path(text).expanduser()])
            elif name == "config_dir":
                self._read_files(files_in(Path(text).expanduser()))
            else:
                self._texts[name] = text
                self.flags.add(name)
        for option in OPTIONS:
            variable = f"OS_DEFAULT__{option.name.upper()}"
            if option.name not in self.flags and variable in environ:
                self._texts[option.name] = environ[variable]
        self._texts.setdefault("model_name", environ.get("DEEPAAS_V2_MODEL", ""))

    def is_set(self, name: str) -> bool:
        """Return whether the option is set anywhere."""
        return name in self._texts

    def of(self, name: str) -> Any:
        """Return an option's value, or its default if it is unset. Raises: SettingError."""
        option = BY_NAME[name]
        if name not in self._texts:
            return option.default
        if name in self._resolving:
            raise SettingError(f"--{option.flag_name}: refers to itself: {' -> '.join([*self._resolving, name])}")
        self._resolving.append(name)
        try:
            return option.read(substitute(self._texts[name], self._value_text))
        finally:
            self._resolving.pop()

    def _value_text(self, name: str) -> str:
        if name not in BY_NAME:
            raise SettingError(f"no such option {name} in group [DEFAULT]")
        return str(self.of(name))

    def _read_files(self, paths: Sequence[Path]) -> None:
        for path in paths:
            for name, text in read_ini(path).items():
                proper = name.lower().replace("-", "_")
                if name in BY_NAME:
                    self._texts[name] = text
                    self.flags.discard(name)
                elif proper in BY_NAME:
                    self.notes.append(f"{path}: {name} is ignored: the option's name is {proper}")


class _Record(argparse.Action):
    """Records an option with its value, in the order of the command line."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        namespace.options.append((self.dest, self.const if self.nargs == 0 else values))


def make_parser() -> argparse.ArgumentParser:
    """Make the original's parser, which also accepts prefixes of flags. It sets `options` and `models`."""
    usage = f"{NAME} [NAME=package.module[:attr] ...] [--FLAG VALUE ...]"
    parser = argparse.ArgumentParser(prog=NAME, usage=usage, epilog=_EPILOG)
    parser.add_argument(
        "models", nargs="*", type=_model, metavar="NAME=MODULE", help="a model (default: the installed ones)"
    )
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, recorded in `options`. Their values are parsed later, since an option may refer to another."""
    parser.set_defaults(options=[])
    parser.add_argument("--version", action="version", version=VERSION)
    for name, text in (("config-file", "a settings file"), ("config-dir", "a folder of settings files, *.conf")):
        parser.add_argument(f"--{name}", action=_Record, metavar="PATH", help=f"{text}; repeatable, the last one wins")
    for option in OPTIONS:
        names = [f"--{option.flag_name}", *option.aliases]
        if isinstance(option.default, bool):
            yes, no = {"nargs": 0, "const": "true"}, {"nargs": 0, "const": "false"}
            parser.add_argument(*names, action=_Record, dest=option.name, help=option.help, **yes)  # type: ignore[arg-type]
            parser.add_argument(
                f"--no{option.flag_name}", action=_Record, dest=option.name,
                help=f"the opposite of --{option.flag_name}", **no,  # type: ignore[arg-type]
            )  # fmt: skip
        else:
            parser.add_argument(*names, action=_Record, dest=option.name, help=option.help, metavar=option.unit)


def _model(argument: str) -> str:
    if "=" not in argument:
        raise argparse.ArgumentTypeError(
            f"{argument!r} is not a model: expected NAME=package.module or NAME=package.module:attr"
        )
    return argument


_OPTION_OF = {
    "http_address": "listen_ip",
    "http_port": "listen_port",
    "http_max_input_size": "client_max_size",
    "log_verbose": "debug",
    "log_format": "use_json",
    "deepaas_base_path": "base_path",
    "deepaas_model": "model_name",
    **{f"deepaas_{name}_endpoint": f"{name}_endpoint" for name in ("train", "predict", "doc", "debug")},
    "deepaas_warm": "warm",
    "deepaas_workers": "workers",
}


def _settings(values: OptionValues) -> Iterator[tuple[str, str]]:
    """Yield settings and their values, as texts. Raises: SettingError."""
    for name, option in _OPTION_OF.items():
        value = values.of(option)
        if option == "base_path" and value and not value.startswith("/"):
            raise SettingError("Base path should start with a '/'.")
        if option == "client_max_size":
            value = value or ANY_SIZE
        elif option == "use_json":
            value = "json" if value else "auto"
        elif option == "debug":
            value = int(value)
        yield name, _bool_text(value) if isinstance(value, bool) else str(value)
    yield "http_receive_timeout_secs", str(RECEIVE_S)


def _notes(values: OptionValues) -> Iterator[str]:
    """Describe the given options that have no effect."""
    for name, instead in _NO_EFFECT.items():
        if values.is_set(name) and values.of(name):
            yield f"--{BY_NAME[name].flag_name} has no effect: {instead}"


def _bool_text(value: bool) -> str:
    return str(value).lower()
