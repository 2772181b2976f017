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

from .options.backend_config import without_effect
from .options.foreign_flags import foreign, lengthened, renamed, sifted
from .options.idle import idle
from .options.setting import FALSE_WORDS, TRUE_WORDS, Setting, shown
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
_NO_SETTINGS = {"command", "paths", "invariance", "json"}
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
_ABOVE = {
    "plan": "predict latency, throughput and the number of devices for a target from measured run times",
    "perf": "load-test any v2 server and report the results, tune it, or compare it with others (docs/perf.md)",
}
"""Commands of the layer above the server."""
_SERVER_COMMANDS = {"serve": "serve models", "check": _CHECK, "doctor": _DOCTOR, "probe": _PROBE}
_VERSION = {"version": "print the version"}
_USAGES = {"check": "[--invariance] PATH...", "doctor": "[--json] [PATH...]", "probe": "[PATH...]"}
_PAGES = "Every flag is also an environment variable (--http-port: PENSTOCK_HTTP_PORT) and a key of the settings file."


class _Parser(argparse.ArgumentParser):
    """argparse, except that paths may appear between flags, and an unknown flag is reported with the nearest one."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: object = None) -> argparse.Namespace:  # type: ignore[override]
        found, surplus = self.parse_known_args(args)
        paths = [word for word in surplus if not word.startswith("-")]
        if len(paths) == len(surplus) and hasattr(found, "paths"):
            found.paths += paths
        elif surplus:
            flags = [item.flag for item in known_settings()] + ["--config", "--help"]
            word = next(word for word in surplus if word not in paths or not hasattr(found, "paths"))
            self.error(foreign(word) or f"unknown argument {word}{nearest(word.partition('=')[0], flags)}")
        return found

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
    words = list(map(renamed, sys.argv[1:] if argv is None else argv))
    called = os.path.basename(sys.argv[0])  # noqa: PTH119 - pathlib is 5 ms
    if argv is None and called in _PROGRAMS:  # started through a link
        words.insert(0, called)
    program = os.path.basename(words[0]) if words else ""  # noqa: PTH119 - a container's command may have a path
    if program in _PROGRAMS:
        return _program(program, words[1:])
    if words and words[0] in _ABOVE:
        return _installed(words[0], words[1:])
    if words == ["probe"]:
        from .probe import words_of_container

        words += _lengthened(list(map(renamed, words_of_container())))
    parser = _parser()
    words, ignored = sifted(words)
    _require_command(words, parser)
    args = parser.parse_args(["version"] if words == ["--version"] else _completed(words, parser))
    if args.command is None:
        parser.print_help()
        return USAGE_STATUS
    if args.command == "version":
        from importlib.metadata import version

        print(f"penstock {version('penstock')}")
        return 0
    try:
        settings = _settings(args)
    except SettingError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return USAGE_STATUS
    for text in (*ignored, *without_effect(settings.backend_config), *idle(settings)):
        print(f"penstock: warning: {text}", file=sys.stderr)
    return _answer(args, settings)


def _answer(args: argparse.Namespace, settings: Settings) -> int:
    """Run a command that takes settings."""
    if args.command == "serve":
        return _serve(settings)
    if args.command == "probe":
        return _probe(settings)
    if args.command == "doctor":
        return _doctor(settings, args.json)
    with _told_once():
        return _check(settings, args.invariance)


def _program(word: str, words: Sequence[str]) -> int:
    """Run a command of another server."""
    module, _, name = _PROGRAMS[word][0].partition(":")
    return int(getattr(importlib.import_module(f".{module}", __package__), name)(words, _serve))


def run_as_triton(words: Sequence[str], _: object) -> int:
    """Run `serve` with a Triton command line, in which flags may be abbreviated.

    Source: Triton server, deploy/: container arguments there, and in KServe's runtime, begin with `tritonserver`.
    """
    return _run(["serve", *_lengthened(words)])


def _lengthened(words: Sequence[str]) -> list[str]:
    known = [item.flag for item in known_settings()]
    return [lengthened(word, known) for word in words]


def _installed(word: str, words: Sequence[str]) -> int:
    """Run a command of the layer above the server, which the server must not import."""
    from importlib.metadata import entry_points

    for found in entry_points(group="penstock.commands", name=word):
        return int(found.load()(words))
    print(f"penstock: the command {word} is not installed: reinstall penstock", file=sys.stderr)
    return USAGE_STATUS


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="penstock", description=_ABOUT, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for word, text in _SERVER_COMMANDS.items():
        command = commands.add_parser(
            word, help=text, usage=f"penstock {word} {_USAGES.get(word, 'PATH...')} [--FLAG VALUE ...]", epilog=_PAGES,
            allow_abbrev=False, formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=36),
        )  # fmt: skip
        command.add_argument("paths", nargs="*", metavar="PATH", help=_PATH)
        command.add_argument("--config", metavar="FILE", help="a TOML file of settings")
        if word == "check":
            command.add_argument("--invariance", action="store_true", help=_INVARIANCE)
        if word == "doctor":
            command.add_argument("--json", action="store_true", help=_JSON)
        groups: dict[str, argparse._ArgumentGroup] = {}
        for item in known_settings():
            if item.group not in groups:
                groups[item.group] = command.add_argument_group(item.group)
            add_flag(groups[item.group], item)
    for word, (_, text) in _PROGRAMS.items():
        commands.add_parser(word, help=text, add_help=False)
    for word, text in _ABOVE.items():
        commands.add_parser(word, help=text, add_help=False)
    for word, text in _VERSION.items():
        commands.add_parser(word, help=text)
    return parser


def _require_command(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Reject a first word that is no command. Suggest the one that was probably meant."""
    known = (*_SERVER_COMMANDS, *_PROGRAMS, *_ABOVE, *_VERSION)
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


def with_values(words: Sequence[str]) -> list[str]:
    """Complete `--access-log` to `--access-log=true`, so that the next word is not taken for its value."""
    return [
        word + "=true" if word in _booleans() and after.lower() not in TRUE_WORDS + FALSE_WORDS else word
        for word, after in itertools.zip_longest(words, words[1:], fillvalue="")
    ]


def _completed(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Complete boolean flags. Reject a word after one that is neither a value of it nor a possible PATH."""
    for flag, word in itertools.pairwise(words):
        if flag not in _booleans() or word.lower() in TRUE_WORDS + FALSE_WORDS:
            continue
        bare = not word.startswith("-") and not set(word) & set("/=:")
        if bare and not os.path.exists(word):  # noqa: PTH110 - as above
            parser.error(f"{flag} must be true or false, not {word!r}, and there is no PATH of that name")
    return with_values(words)


@functools.cache
def _booleans() -> frozenset[str]:
    return frozenset(item.flag for item in known_settings() if isinstance(item.default, bool))


def _settings(args: argparse.Namespace) -> Settings:
    flags = {name: value for name, value in vars(args).items() if name not in _NO_SETTINGS and value is not None}
    paths = [*args.paths, *flags.pop("model_repository", ())]
    if paths:
        flags["model_repository"] = paths
    settings = resolve(flags, os.environ)
    if args.command in _NEED_PATHS and not settings.model_repository:
        from .dialects import dialect_of

        if nothing := dialect_of(settings).nothing:
            raise SettingError(nothing)
    return settings


@contextlib.contextmanager
def _told_once() -> Iterator[None]:
    """Keep the reason a worker could not be opened, which the report contains, from also being logged."""
    import logging

    logger = logging.getLogger("penstock.workers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _check(settings: Settings, invariance: bool) -> int:
    from .dialects import dialect_of
    from .options.starting import obstacles
    from .repository.remote import RemoteError

    try:
        report, status = dialect_of(settings).check(invariance=invariance)
    except RemoteError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    found = [f"the server would not start: {text}" for text in obstacles(settings)]
    return _told("\n".join([report, *found]), 1 if found else status)


def _doctor(settings: Settings, as_json: bool) -> int:
    from .doctor.command import examine

    report = examine(settings)
    return _told(report.json() if as_json else str(report), report.status)


def _told(text: str, status: int) -> int:
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
