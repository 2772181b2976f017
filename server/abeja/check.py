"""`penstock check --dialect abeja`: reports what would be served, and every mistake. Called by the command line.

No code of the handler is run, and nothing is installed: its module is located and parsed.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from penstock.backends.errors import InferError
from penstock.batching.spec import ModelSpec
from penstock.server.carrying.check_output import describe_code, unreadable_module
from penstock.server.environments.recipe import read_recipe
from penstock.server.modules import defined_names, find_module_file, parse_file
from penstock.server.repository.check import CheckReport
from penstock.server.repository.findings import Finding
from penstock.server.settings import Settings

from .folder import AbejaFolder

ARGUMENT_COUNT = 2
"""The number of a handler's arguments: a request and a context."""


def check_handler(settings: Settings) -> CheckReport:
    """Check the folder of a command line; blocks."""
    folder = AbejaFolder(settings)
    if problem := folder.invalid_path():
        return CheckReport(findings=[problem])
    spec = folder.spec()
    findings = [*_settings_mistakes(spec, settings), *_requirements_mistakes(spec), *_handler_mistakes(spec)]
    if any(finding.is_mistake for finding in findings):
        return CheckReport(findings=findings)
    notes = {spec.name: describe_code(spec, "handler", spec.options["handler"])}
    return CheckReport(specs=[replace(spec, options={})], findings=findings, extra_lines=notes)


def _settings_mistakes(spec: ModelSpec, settings: Settings) -> Iterator[Finding]:
    if settings.http_port == settings.abeja_health_port != 0:
        yield Finding(spec.path, f"both ports are {settings.http_port}: they must be different")
    if spec.worker.interpreter and shutil.which(spec.worker.interpreter) is None:
        yield Finding(Path(spec.worker.interpreter), "--abeja-interpreter: not found, or not executable")
    try:
        json.loads(os.environ.get("CONTEXT", "{}"))
    except ValueError as error:
        yield Finding(spec.path, f"CONTEXT in the environment is not JSON: {error}")


def _requirements_mistakes(spec: ModelSpec) -> Iterator[Finding]:
    requirements = spec.worker.requirements
    if requirements is not None:
        try:
            read_recipe(requirements, requirements.name)
        except InferError as error:
            yield Finding(requirements, error.message.removeprefix(f"{requirements.name}: "))


def _handler_mistakes(spec: ModelSpec) -> Iterator[Finding]:
    """Find what would prevent the handler from being imported or called, as far as its module's file shows."""
    handler: str = spec.options["handler"]
    if handler.count(":") != 1:
        yield Finding(spec.path, f"handler '{handler}': it must be module:name, with one colon")
        return
    module, _, name = handler.partition(":")
    # its requirements are not installed yet
    is_own_python = not spec.worker.interpreter and spec.worker.requirements is None
    try:
        path = find_module_file(module, [str(spec.path)], installed=is_own_python)
    except ModuleNotFoundError as error:
        text = f"handler '{handler}': there is no module '{error.name}'"
        yield Finding(spec.path, text, is_mistake=is_own_python or "." not in module)
        return
    if path is None or path.suffix != ".py":
        return
    try:
        tree = parse_file(path)
    except (OSError, SyntaxError, ValueError) as error:
        yield unreadable_module(path, error)
    else:
        yield from _definition_mistakes(tree, name, path)


def _definition_mistakes(tree: ast.Module, name: str, path: Path) -> Iterator[Finding]:
    names = defined_names(tree)
    if name not in names and not names & {"*", "__getattr__"}:
        yield Finding(path, f"has no '{name}'")
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    definitions = [node for node in tree.body if isinstance(node, functions) and node.name == name]
    if definitions and not definitions[-1].decorator_list:
        function = definitions[-1]
        if not _accepts_arguments(function.args):
            text = f"{name} does not accept a request and a context: every call would return 500"
            yield Finding(path, text, function.lineno)
        if _yields(function):
            text = f"{name} is a generator, so it does not return a dict: every call would return 500"
            yield Finding(path, text, function.lineno)


def _accepts_arguments(arguments: ast.arguments) -> bool:
    """Return whether a function with these arguments takes a request and a context."""
    positional_count = len(arguments.posonlyargs) + len(arguments.args)
    required_count = positional_count - len(arguments.defaults)
    return (
        required_count <= ARGUMENT_COUNT
        and (positional_count >= ARGUMENT_COUNT or arguments.vararg is not None)
        and None not in arguments.kw_defaults
    )


def _yields(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function itself, not one nested in it, has a `yield`."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            pending += ast.iter_child_nodes(node)
    return False
