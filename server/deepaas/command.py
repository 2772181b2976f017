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

from .ini import default_files, default_folders, files_in, read_ini, substituted
from .options import BY_NAME, OPTIONS, VERSION

NAME = "deepaas-run"
FAILED_STATUS = 1
ANY_SIZE = 2**40
"""Bytes of a body, if there is no limit."""
RECEIVE_S = 3600
"""Time for a request to arrive: the original has no limit, and files may be large."""
_OURS = (
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
    "openwhisk_detect": "models are served over HTTP alone",
}


@dataclass(frozen=True, slots=True)
class DeepaasCommand:
    """What a command line requests. `notes` describe options that have no effect here."""

    settings: Settings
    notes: list[str] = field(default_factory=list)


def run(argv: Sequence[str], serve: Callable[[Settings], int]) -> int:
    """Serve what a command line requests. Returns: the exit status. Raises: SystemExit for an invalid command line."""
    try:
        asked = ask(argv, os.environ)
    except SettingError as error:
        sys.stderr.write(f"{error}\n")
        return FAILED_STATUS
    for note in asked.notes:
        sys.stderr.write(f"{NAME}: {note}\n")
    return serve(asked.settings)


def ask(argv: Sequence[str], environ: Mapping[str, str]) -> DeepaasCommand:
    """Parse a command line. It overrides PENSTOCK_ variables, which override the original's variables and files.

    Raises: SettingError; SystemExit (2) for unknown arguments, (0) for --help and --version.
    """
    parser = parser_of()
    theirs = {option for action in parser._actions for option in action.option_strings}  # noqa: SLF001
    ours, words = parse_own_flags(NAME, argv, theirs)
    said = parser.parse_intermixed_args(words)
    values = OptionValues(said.said, environ)
    flags: dict[str, Any] = {}
    below: dict[str, str] = {}
    for name, value in _settings(values):
        option = _OPTION_OF.get(name, "")
        if option in values.flags:
            flags[name] = value
        else:
            below[PREFIX + name.upper()] = value
    below[PREFIX + "ALLOW_GRPC"] = _word("grpc_port" in ours)
    below[PREFIX + "ALLOW_METRICS"] = _word("metrics_port" in ours)
    flags |= {**ours, "dialect": "deepaas"}
    paths = [*said.models, *ours.get("model_repository", ())]
    if paths:
        flags["model_repository"] = paths
    return DeepaasCommand(resolve(flags, {**below, **environ}), [*values.notes, *_notes(values)])


class OptionValues:
    """The options that are set, by their names with `_`. `flags` are those set by a flag of the command line.

    Raises: SettingError for files that cannot be read.
    """

    def __init__(self, said: Sequence[tuple[str, str]], environ: Mapping[str, str], program: str = NAME) -> None:
        self.notes: list[str] = []
        self.flags: set[str] = set()
        self._texts: dict[str, str] = {}
        self._asked: list[str] = []
        named = {name for name, _ in said}
        if "config_file" not in named:
            self._take_files(default_files(environ, program))
        if "config_dir" not in named:
            for folder in default_folders(environ, program):
                self._take_files(files_in(folder))
        # later words of the command line override earlier ones, whether options or files
        for name, text in said:
            if name == "config_file":
                self._take_files([Path(text).expanduser()])
            elif name == "config_dir":
                self._take_files(files_in(Path(text).expanduser()))
            else:
                self._texts[name] = text
                self.flags.add(name)
        for option in OPTIONS:
            variable = f"OS_DEFAULT__{option.name.upper()}"
            if option.name not in self.flags and variable in environ:
                self._texts[option.name] = environ[variable]
        self._texts.setdefault("model_name", environ.get("DEEPAAS_V2_MODEL", ""))

    def given(self, name: str) -> bool:
        """Return whether the option is set anywhere."""
        return name in self._texts

    def of(self, name: str) -> Any:
        """Return an option's value, or its default if it is unset. Raises: SettingError."""
        option = BY_NAME[name]
        if name not in self._texts:
            return option.default
        if name in self._asked:
            raise SettingError(f"--{option.spelled}: stands for itself: {' -> '.join([*self._asked, name])}")
        self._asked.append(name)
        try:
            return option.read(substituted(self._texts[name], self._referred))
        finally:
            self._asked.pop()

    def _referred(self, name: str) -> str:
        if name not in BY_NAME:
            raise SettingError(f"no such option {name} in group [DEFAULT]")
        return str(self.of(name))

    def _take_files(self, paths: Sequence[Path]) -> None:
        for path in paths:
            for name, text in read_ini(path).items():
                meant = name.lower().replace("-", "_")
                if name in BY_NAME:
                    self._texts[name] = text
                    self.flags.discard(name)
                elif meant in BY_NAME:
                    self.notes.append(f"{path}: {name} is not read: the name is {meant}")


class _Say(argparse.Action):
    """Records an option with its value, in the order of the command line."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        namespace.said.append((self.dest, self.const if self.nargs == 0 else values))


def parser_of() -> argparse.ArgumentParser:
    """Make the original's parser, which also accepts prefixes of flags. It sets `said` and `models`."""
    usage = f"{NAME} [NAME=package.module[:attr] ...] [--FLAG VALUE ...]"
    parser = argparse.ArgumentParser(prog=NAME, usage=usage, epilog=_OURS)
    parser.add_argument(
        "models", nargs="*", type=_model, metavar="NAME=MODULE", help="a model (default: the installed ones)"
    )
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, recorded in `said`. Their values are parsed later, since an option may refer to another."""
    parser.set_defaults(said=[])
    parser.add_argument("--version", action="version", version=VERSION)
    for name, about in (("config-file", "a settings file"), ("config-dir", "a folder of settings files, *.conf")):
        parser.add_argument(f"--{name}", action=_Say, metavar="PATH", help=f"{about}; repeatable, the last one wins")
    for option in OPTIONS:
        names = [f"--{option.spelled}", *option.aliases]
        if isinstance(option.default, bool):
            yes, no = {"nargs": 0, "const": "true"}, {"nargs": 0, "const": "false"}
            parser.add_argument(*names, action=_Say, dest=option.name, help=option.about, **yes)  # type: ignore[arg-type]
            parser.add_argument(
                f"--no{option.spelled}", action=_Say, dest=option.name, help=f"the opposite of --{option.spelled}", **no  # type: ignore[arg-type]
            )  # fmt: skip
        else:
            parser.add_argument(*names, action=_Say, dest=option.name, help=option.about, metavar=option.unit)


def _model(word: str) -> str:
    if "=" not in word:
        raise argparse.ArgumentTypeError(
            f"{word!r} is no model: wanted NAME=package.module or NAME=package.module:attr"
        )
    return word


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
        yield name, _word(value) if isinstance(value, bool) else str(value)
    yield "http_receive_timeout_secs", str(RECEIVE_S)


def _notes(values: OptionValues) -> Iterator[str]:
    """Describe the given options that have no effect."""
    for name, instead in _NO_EFFECT.items():
        if values.given(name) and values.of(name):
            yield f"--{BY_NAME[name].spelled} has no effect: {instead}"


def _word(truth: bool) -> str:
    return str(truth).lower()
