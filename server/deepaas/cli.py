"""The command line of `deepaas-cli`: calls a model's methods in this process. Called by server/cli.py.

User code is imported here, as in the original, since this process serves no one. `warm` is called before `predict` and
`train`.
Source: deepaas 2.6.0, cmd/cli.py: arguments, what is printed and stored, and the exit status.
"""

from __future__ import annotations

import argparse
import io
import json
import mimetypes
import os
import shutil
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.server.settings import SettingError

from .command import FAILED_STATUS, OptionValues, add_options
from .entries import Target, parse_target
from .fields import add_fields, files_of, given_fields
from .inside.answers import write_json
from .inside.arguments import JSON_TYPES
from .inside.files import uploaded_file_class
from .inside.model import WrappedModel
from .inside.service import IMPORTABLE, to_json
from .installed import installed_in

NAME = "deepaas-cli"
_JSON = ".json"
METHODS = {
    "get_metadata": "print the metadata (the default)",
    "warm": "prepare the model",
    "predict": "predict, and print or store the result",
    "train": "train, and print or store a record",
}
_WITH_ARGUMENTS = ("predict", "train")
_USAGE = f"{NAME} [NAME=package.module[:attr]] [--FLAG VALUE ...] METHOD [--ARGUMENT VALUE ...]"


def run(argv: Sequence[str], serve: object) -> int:
    """Run the method that a command line names. Returns: the exit status. Raises: SystemExit for wrong usage."""
    return run_user_code(lambda: _run(list(argv)))


def run_user_code(function: Callable[[], None]) -> int:
    """Run a command that imports and calls user code in this process. Returns: the exit status. Raises: SystemExit."""
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - a text is wanted
    if IMPORTABLE not in sys.path:
        sys.path.append(IMPORTABLE)
    try:
        function()
    except SettingError as error:
        sys.stderr.write(f"{error}\n")
        return FAILED_STATUS
    except Exception:  # noqa: BLE001 - of user code, whatever it is
        traceback.print_exc()
        return FAILED_STATUS
    return 0


def _run(words: list[str]) -> None:
    target = pop_target(words)
    parser = _parser()
    before, after = _split(words, parser)
    given = parser.parse_args(before)
    method = given.methods
    values = OptionValues(given.options, os.environ, NAME)
    found = target or find_target(values.of("model_name"))
    model = WrappedModel(found.name, found.target)
    fields = model.arguments(f"get_{method}_args") if method in _WITH_ARGUMENTS else {}
    of_method = argparse.ArgumentParser(prog=f"{NAME} {method}", conflict_handler="resolve")
    add_fields(of_method, fields)
    parsed, unknown = of_method.parse_known_args(after)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments = given_fields(parsed, fields)
    call = MethodCall(model, given.deepaas_method_output or "")
    call.print(f"{method} was called.")
    if method in _WITH_ARGUMENTS and values.of("warm"):
        model.warm()
    with _files(files_of(fields), arguments):
        call.run(method, arguments)


def pop_target(words: list[str]) -> Target | None:
    """Remove the model from the start of a command line, and return it; None if there is none."""
    return parse_target(words.pop(0)) if words and "=" in words[0] and not words[0].startswith("-") else None


def _split(words: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Split the words after the method, which is not the value of a flag."""
    without_value = {flag for action in parser._actions if action.nargs == 0 for flag in action.option_strings}  # noqa: SLF001
    for at, word in enumerate(words):
        flag = words[at - 1] if at else ""
        is_value = flag.startswith("-") and "=" not in flag and flag not in without_value
        if word in METHODS and not is_value:
            return words[: at + 1], words[at + 1 :]
    return words, []


def _parser() -> argparse.ArgumentParser:
    """Make the parser for the words before a method's arguments."""
    parser = argparse.ArgumentParser(prog=NAME, usage=_USAGE)
    add_options(parser)
    parser.add_argument("--deepaas_method_output", metavar="FILE", help="file for the result")
    for flag in ("--deepaas_with_multiprocessing", "--nodeepaas_with_multiprocessing"):
        parser.add_argument(flag, action="store_true", help="has no effect: no process is started")
    about = "; ".join(f"{name}: {text}" for name, text in METHODS.items())
    about += ". METHOD --help lists its arguments"
    parser.add_argument("methods", nargs="?", type=_method, choices=METHODS, help=about)
    return parser


def _method(word: str) -> str:
    """Return the name of a method. Raises: ArgumentTypeError for a model, which comes first."""
    if "=" in word:
        raise argparse.ArgumentTypeError(f"{word!r} names a model, and the model must come first: {_USAGE}")
    return word


def find_target(name: str) -> Target:
    """Find the model. Raises: SettingError unless there is exactly one."""
    available = {each[0]: Target(*each) for each in installed_in().entries}
    if name:
        if name not in available:
            raise SettingError(f"[ERROR]: The model {name} is not available.\nAvailable models: {list(available)}")
        return available[name]
    if not available:
        raise SettingError("[ERROR]: No model is installed, and none is given as NAME=package.module[:attr].")
    if len(available) > 1:
        text = "You have to choose one and set it in the DEEPAAS_V2_MODEL environment variable or using --model-name."
        raise SettingError(f"[ERROR]: There are several models available ({list(available)}).\n{text}")
    return next(iter(available.values()))


@contextmanager
def _files(names: Sequence[str], arguments: dict[str, Any]) -> Iterator[None]:
    """Replace paths by uploads for the duration of the block: copies, which the model may delete."""
    copies: list[str] = []
    try:
        for name in names:
            path = arguments.get(name)
            if isinstance(path, str) and path:
                descriptor, copy = tempfile.mkstemp()
                os.close(descriptor)
                copies.append(shutil.copyfile(path, copy))
                arguments[name] = uploaded_file_class()("data", copy, mimetypes.guess_type(path)[0], path)
        yield
    finally:
        for copy in copies:
            Path(copy).unlink(missing_ok=True)


class MethodCall:
    """One call of a model's method. It prints to stdout, in the form of oslo.log's lines."""

    def __init__(self, model: WrappedModel, output: str) -> None:
        self._model = model
        self._output = output

    def print(self, text: str, level: str = "INFO") -> None:
        """Print a line."""
        moment = datetime.now().isoformat(" ", "milliseconds")  # noqa: DTZ005 - local time, for people
        sys.stdout.write(f"{moment} {os.getpid()} {level} deepaas.cmd.cli [-] {text}\n")
        sys.stdout.flush()

    def run(self, method: str | None, arguments: dict[str, Any]) -> None:
        """Call it, and print or store the result. Raises: the model's exceptions; TypeError for what is not JSON."""
        if method == "warm":
            self._model.warm()
            self.print("return: Finished warm() method")
        elif method == "predict":
            self._predict(arguments)
        elif method == "train":
            self._train(arguments)
        else:
            if not method:
                self.print("No Method was requested! Return get_metadata()", "WARNING")
            text = json.dumps(self._metadata())
            if method and self._output:
                self._store(text.encode())
            self.print(f"return: {text}")

    def _metadata(self) -> Any:
        method = self._model.method("get_metadata")
        return method() if method is not None else {"name": self._model.name}

    def _require(self, name: str) -> Callable[..., Any]:
        method = self._model.method(name)
        if method is None:
            raise SettingError(f"[ERROR]: The model {self._model.name} has no {name}.")
        return method

    def _predict(self, arguments: dict[str, Any]) -> None:
        value = self._require("predict")(**arguments)
        if not self._output:
            self.print(f"return: {value}")
            return
        accept = arguments.get("accept")
        extension = mimetypes.guess_extension(accept) if accept else _JSON
        given = Path(self._output).suffix
        if extension and extension != given:
            self._output += extension
            self.print(
                f"You are trying to store {extension} type data in the file with {given} extension!\n"
                f"===================> New output is {self._output}", "WARNING",
            )  # fmt: skip
        is_json = extension == _JSON or accept in JSON_TYPES
        self._store(write_json(value).encode() if is_json else content_of(value))
        self.print(f"return: Output is saved in {self._output}")

    def _train(self, arguments: dict[str, Any]) -> None:
        start = datetime.now()  # noqa: DTZ005 - as the API's records
        output = self._require("train")(**arguments)
        end = datetime.now()  # noqa: DTZ005
        args = {name: to_json(value) for name, value in arguments.items()}
        result = {"finish_date": str(end), "duration": str(end - start), "output": to_json(output)}
        record = {"date": str(start), "args": args, "status": "done", "uuid": uuid.uuid4().hex, "result": result}
        text = write_json(record)
        self.print(f"Elapsed time:  {end - start}")
        if self._output:
            self._store(text.encode())
            text = f"Output is saved in {self._output}"
        self.print(f"return: {text}")

    def _store(self, content: bytes) -> None:
        path = Path(self._output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def content_of(value: Any) -> bytes:
    """Return a result as the content of a file; that of an open file is its content. Raises: TypeError."""
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, io.BufferedReader):
        return Path(os.fsdecode(value.name)).read_bytes()
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    return value.encode() if isinstance(value, str) else write_json(value).encode()
