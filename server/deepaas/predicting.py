"""The command line of `deepaas-predict`: passes one file or URL to a model's `predict_data` or `predict_url`.

These are methods of API version 1. Many modules still have them beside `predict`, and scripts of OSCAR's services call
them through this command. Called by server/cli.py; as in cli.py, user code is imported here, and `warm` is called
first.
Source: deepaas 2.6.0, cmd/execute.py: the arguments of the call, the names of stored files, and the exit status.
"""

from __future__ import annotations

import argparse
import mimetypes
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.server.settings import SettingError

from .cli import content_of, find_target, pop_target, run_user_code
from .command import OptionValues, add_options
from .inside.files import uploaded_file_class
from .inside.model import WrappedModel

NAME = "deepaas-predict"
_USAGE = f"{NAME} [NAME=package.module[:attr]] --input-file FILE --output FOLDER [--FLAG VALUE ...]"
_INSTEAD = "use `penstock deepaas-cli predict --ARGUMENT VALUE ...`, where an argument that is a file takes its path"
_JSON = ".json"


def run(argv: Sequence[str], serve: object) -> int:
    """Make the prediction of a command line. Returns: the exit status. Raises: SystemExit for wrong usage."""
    return run_user_code(lambda: _run(list(argv)))


def _run(words: list[str]) -> None:
    target = pop_target(words)
    given = _parser().parse_args(words)
    for name in ("input_file", "output"):
        if getattr(given, name) is None:
            raise SettingError(f"ERROR: Option {name} is required.")
    values = OptionValues(given.options, os.environ, NAME)
    found = target or find_target(values.of("model_name"))
    model = WrappedModel(found.name, found.target)
    method = model.method("predict_url" if given.url else "predict_data")
    if method is None:
        raise SettingError(f"ERROR: The model {model.name} has no method of version 1: {_INSTEAD}")
    if values.of("warm"):
        model.warm()
    path = given.input_file
    # as in the original, a file is itself the upload, not a copy
    sent = (
        {"urls": [path]} if given.url else {"files": [uploaded_file_class()(path, path, mimetypes.guess_type(path)[0])]}
    )
    stored = _store(method({**sent, "accept": given.content_type}), given)
    sys.stdout.write(f"Output saved at {stored}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=NAME, usage=_USAGE)
    add_options(parser)
    parser.add_argument("--input-file", "-i", metavar="FILE", help="file or URL to predict from")
    parser.add_argument(
        "--content-type", "-ct", default="application/json", help="content type of the result (application/json)"
    )
    parser.add_argument("--output", "-o", metavar="FOLDER", help="folder for the result, created if missing")
    parser.add_argument("--url", "-u", action="store_true", help="--input-file is a URL")
    parser.add_argument("--nourl", dest="url", action="store_false", help="--input-file is a file")
    return parser


def _store(value: Any, given: argparse.Namespace) -> str:
    """Store a result. Returns: its path. Raises: SettingError for a wrong content type or no result; OSError."""
    extension = mimetypes.guess_extension(given.content_type)
    if value is None or extension is None:
        raise SettingError(f"ERROR: Content type {given.content_type} not valid.")
    Path(given.output).mkdir(parents=True, exist_ok=True)
    name = f"out_{Path(given.input_file).stem}{extension}"
    path = getattr(value, "name", None)
    if extension == _JSON:
        content = f"{value!r}\n".encode()  # not JSON, as in the original: its readers expect Python's repr
    elif isinstance(path, str) and Path(path).is_file():
        return shutil.copy(path, given.output)
    else:
        content = content_of(value)
    stored = os.path.join(given.output, name)  # noqa: PTH118 - as it is given
    Path(stored).write_bytes(content)
    return stored
