"""The command line: `penstock serve`, `check`, `doctor`, `probe`, `plan`, `perf` and `version`.

Heavy modules are imported only when needed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn

from .options.backend_config import ineffective_rules
from .options.setting import FALSE_WORDS, TRUE_WORDS, Setting, shown
from .options.triton_flags import complete_flag, rename_flag, translate_flags, unsupported_reason
from .options.unused_settings import unused_settings
from .settings import SettingError, Settings, known_settings, nearest, resolve

USAGE_STATUS = 2
PIPE_STATUS = 141
"""128 + SIGPIPE, a shell's status for a process ended by that signal."""
_NEED_PATHS = ("serve", "check")
_PROGRAMS = {
    "seldon-core-microservice": ("seldon.command:run", "serve a Seldon Core component (docs/seldon.md)"),
    "deepaas-run": ("deepaas.command:run", "serve DEEPaaS models (docs/deepaas.md)"),
    "deepaas-cli": ("deepaas.cli:run", "call the methods of a DEEPaaS model without a server"),
    "deepaas-predict": ("deepaas.predicting:run", "call the `predict_data` of a DEEPaaS model with a file"),
    "abeja": ("abeja.command:run", "serve or call an ABEJA handler (docs/abeja.md)"),
    "sagemaker": ("clouds.command:run", "serve in an Amazon SageMaker container (docs/clouds.md)"),
    "tritonserver": ("cli:run_as_triton", "serve, for command lines written for Triton"),
}
"""Commands of other servers that are accepted here: what runs each, and its help text."""
_NOT_SETTINGS = {"command", "paths", "invariance", "json"}
_ABOUT = (
    "An inference server for ONNX models, TensorFlow SavedModels, Python models, and Cortex, Seldon Core, DEEPaaS and "
    "ABEJA projects."
)
_CHECK = "report what `serve` with the same arguments would serve, and all errors, without serving"
_DOCTOR = "report what this machine has for serving, what is wrong with it, and how to fix it (docs/doctor.md)"
_PROBE = (
    "ask whether the server started by `serve` with the same arguments is ready; without arguments, the container's "
    "server. Exit status 0 if ready, otherwise 1"
)
_PATH = (
    "a model repository, its URL, or one model; with --dialect cortex, seldon or abeja, the folder to serve; with "
    "--dialect deepaas, NAME=package.module[:attr]"
)
_JSON = "print the findings as JSON"
_INVARIANCE = "also run each model, to report whether its answers depend on the other requests in the batch"
_UPPER_COMMANDS = {
    "plan": "predict latency, throughput and the number of devices for a target from measured run times",
    "perf": "load-test any v2 server and report the results, tune it, or compare it with others (docs/perf.md)",
}
"""Commands of the layer above the server."""
_SERVER_COMMANDS = {"serve": "serve models", "check": _CHECK, "doctor": _DOCTOR, "probe": _PROBE}
_VERSION = {"version": "print the version"}
_USAGES = {"check": "[--invariance] PATH...", "doctor": "[--json] [PATH...]", "probe": "[PATH...]"}
_EPILOG = "Every flag is also an environment variable (--http-port: PENSTOCK_HTTP_PORT) and a key of the settings file."


class _Parser(argparse.ArgumentParser):
    """argparse, except that paths may appear between flags, and an unknown flag is reported with the nearest one."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: object = None) -> argparse.Namespace:  # type: ignore[override]
        parsed, remaining = self.parse_known_args(args)
        paths = [argument for argument in remaining if not argument.startswith("-")]
        if len(paths) == len(remaining) and hasattr(parsed, "paths"):
            parsed.paths += paths
        elif remaining:
            flags = [item.flag for item in known_settings()] + ["--config", "--help"]
            argument = next(argument for argument in remaining if argument not in paths or not hasattr(parsed, "paths"))
            hint = nearest(argument.partition("=")[0], flags)
            self.error(unsupported_reason(argument) or f"unknown argument {argument}{hint}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_STATUS, f"penstock: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0 done, 1 failed, 2 wrong usage, 141 if the reader closed (`| head`)."""
    _open_closed_streams()
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = None  # otherwise its buffer would be written again at exit
        return PIPE_STATUS


def _open_closed_streams() -> None:
    """Open closed standard streams (`2>&-`) as /dev/null: libuv aborts if a socket takes the place of one."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor, which is this one
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(map(rename_flag, sys.argv[1:] if argv is None else argv))
    program_name = os.path.basename(sys.argv[0])  # noqa: PTH119 - pathlib is 5 ms
    if argv is None and program_name in _PROGRAMS:  # started through a link
        arguments.insert(0, program_name)
    program = os.path.basename(arguments[0]) if arguments else ""  # noqa: PTH119 - a container's command may have a path
    if program in _PROGRAMS:
        return _run_program(program, arguments[1:])
    if arguments and arguments[0] in _UPPER_COMMANDS:
        return _run_upper_command(arguments[0], arguments[1:])
    if arguments == ["probe"]:
        from .probe import container_arguments

        arguments += _complete_flags(list(map(rename_flag, container_arguments())))
    parser = _make_parser()
    arguments, ignored = translate_flags(arguments)
    _require_command(arguments, parser)
    args = parser.parse_args(["version"] if arguments == ["--version"] else _check_booleans(arguments, parser))
    if args.command is None:
        parser.print_help()
        return USAGE_STATUS
    if args.command == "version":
        from importlib.metadata import version

        print(f"penstock {version('penstock')}")
        return 0
    try:
        settings = _read_settings(args)
    except SettingError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return USAGE_STATUS
    for text in (*ignored, *ineffective_rules(settings.backend_config), *unused_settings(settings)):
        print(f"penstock: warning: {text}", file=sys.stderr)
    return _run_command(args, settings)


def _run_command(args: argparse.Namespace, settings: Settings) -> int:
    """Run a command that takes settings."""
    if args.command == "serve":
        return _serve(settings)
    if args.command == "probe":
        return _probe(settings)
    if args.command == "doctor":
        return _doctor(settings, args.json)
    with _without_worker_warnings():
        return _check(settings, args.invariance)


def _run_program(name: str, arguments: Sequence[str]) -> int:
    """Run a command of another server."""
    module, _, function = _PROGRAMS[name][0].partition(":")
    return int(getattr(importlib.import_module(f".{module}", __package__), function)(arguments, _serve))


def run_as_triton(arguments: Sequence[str], _: object) -> int:
    """Run `serve` with a Triton command line, in which flags may be abbreviated.

    Source: Triton server, deploy/: container arguments there, and in KServe's runtime, begin with `tritonserver`.
    """
    return _run(["serve", *_complete_flags(arguments)])


def _complete_flags(arguments: Sequence[str]) -> list[str]:
    known_flags = [item.flag for item in known_settings()]
    return [complete_flag(argument, known_flags) for argument in arguments]


def _run_upper_command(name: str, arguments: Sequence[str]) -> int:
    """Run a command of the layer above the server, which the server must not import."""
    from importlib.metadata import entry_points

    for entry_point in entry_points(group="penstock.commands", name=name):
        return int(entry_point.load()(arguments))
    print(f"penstock: the command {name} is not installed: reinstall penstock", file=sys.stderr)
    return USAGE_STATUS


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="penstock", description=_ABOUT, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, text in _SERVER_COMMANDS.items():
        command = commands.add_parser(
            name, help=text, usage=f"penstock {name} {_USAGES.get(name, 'PATH...')} [--FLAG VALUE ...]", epilog=_EPILOG,
            allow_abbrev=False, formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=36),
        )  # fmt: skip
        command.add_argument("paths", nargs="*", metavar="PATH", help=_PATH)
        command.add_argument("--config", metavar="FILE", help="a TOML file of settings")
        if name == "check":
            command.add_argument("--invariance", action="store_true", help=_INVARIANCE)
        if name == "doctor":
            command.add_argument("--json", action="store_true", help=_JSON)
        groups: dict[str, argparse._ArgumentGroup] = {}
        for item in known_settings():
            if item.group not in groups:
                groups[item.group] = command.add_argument_group(item.group)
            add_flag(groups[item.group], item)
    for name, (_, text) in _PROGRAMS.items():
        commands.add_parser(name, help=text, add_help=False)
    for name, text in _UPPER_COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    for name, text in _VERSION.items():
        commands.add_parser(name, help=text)
    return parser


def _require_command(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Reject a first word that is no command. Suggest the one that was probably meant."""
    known = (*_SERVER_COMMANDS, *_PROGRAMS, *_UPPER_COMMANDS, *_VERSION)
    if not words or words[0].startswith("-") or words[0] in known:
        return
    meant = nearest(words[0], known)
    if not meant and os.path.exists(words[0]):  # noqa: PTH110 - as above
        import shlex

        meant = f"; to serve it: penstock serve {shlex.join(words)}"
    parser.error(f"unknown command '{words[0]}'{meant or '; penstock --help lists the commands'}")


def add_flag(group: argparse._ActionsContainer, item: Setting) -> None:
    """Add a setting to a parser, under its name. A setting that is not given has no attribute."""
    repeated = isinstance(item.default, tuple)
    metavar = item.unit.split()[-1].upper() if item.unit else "|".join(item.choices)
    if isinstance(item.default, bool):
        metavar = "BOOL"
    default = f" ({shown(item.default)})" if shown(item.default) else ""
    group.add_argument(
        item.flag, dest=item.name, metavar=metavar or "TEXT", help=(item.text + default).replace("%", "%%"),
        action="append" if repeated else "store", default=argparse.SUPPRESS,
    )  # fmt: skip


def with_boolean_values(arguments: Sequence[str]) -> list[str]:
    """Complete `--access-log` to `--access-log=true`, so that the next word is not taken for its value."""
    return [
        flag + "=true" if flag in _boolean_flags() and value.lower() not in TRUE_WORDS + FALSE_WORDS else flag
        for flag, value in itertools.zip_longest(arguments, arguments[1:], fillvalue="")
    ]


def _check_booleans(arguments: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Complete boolean flags. Reject a word after one that is neither a value of it nor a possible PATH."""
    for flag, argument in itertools.pairwise(arguments):
        if flag not in _boolean_flags() or argument.lower() in TRUE_WORDS + FALSE_WORDS:
            continue
        is_plain_word = not argument.startswith("-") and not set(argument) & set("/=:")
        if is_plain_word and not os.path.exists(argument):  # noqa: PTH110 - as above
            parser.error(f"{flag} must be true or false, not {argument!r}, and there is no PATH of that name")
    return with_boolean_values(arguments)


@functools.cache
def _boolean_flags() -> frozenset[str]:
    return frozenset(item.flag for item in known_settings() if isinstance(item.default, bool))


def _read_settings(args: argparse.Namespace) -> Settings:
    flags = {name: value for name, value in vars(args).items() if name not in _NOT_SETTINGS and value is not None}
    paths = [*args.paths, *flags.pop("model_repository", ())]
    if paths:
        flags["model_repository"] = paths
    settings = resolve(flags, os.environ)
    if args.command in _NEED_PATHS and not settings.model_repository:
        from .dialects import dialect_of

        if message := dialect_of(settings).no_paths_message:
            raise SettingError(message)
    return settings


@contextlib.contextmanager
def _without_worker_warnings() -> Iterator[None]:
    """Keep the reason a worker could not be opened, which the report contains, from also being logged."""
    import logging

    logger = logging.getLogger("penstock.workers")
    previous_level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(previous_level)


def _check(settings: Settings, invariance: bool) -> int:
    from .dialects import dialect_of
    from .options.start_checks import start_problems
    from .repository.remote import RemoteError

    try:
        report, status = dialect_of(settings).check(invariance=invariance)
    except RemoteError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    problems = [f"the server would not start: {text}" for text in start_problems(settings)]
    return _print_report("\n".join([report, *problems]), 1 if problems else status)


def _doctor(settings: Settings, as_json: bool) -> int:
    from .doctor.command import examine

    report = examine(settings)
    return _print_report(report.json() if as_json else str(report), report.status)


def _print_report(text: str, status: int) -> int:
    """Print a report, which a reader such as `head` may close early. Returns: the exit status."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        pass
    except OSError as error:
        print(f"penstock: the report could not be written: {error.strerror}", file=sys.stderr)
        status = 1
    else:
        return status
    sys.stdout = None  # otherwise its buffer would be written again at exit
    return status


def _probe(settings: Settings) -> int:
    from .probe import probe

    status, line = probe(settings)
    print(line)
    return status


def _serve(settings: Settings) -> int:
    from .process import run

    status = run(settings)
    sys.stdout.flush()
    sys.stderr.flush()
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        # A load or a hook that hangs in native code would keep the interpreter from exiting.
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
