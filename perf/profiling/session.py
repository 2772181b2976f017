"""A session: drives one model of one server level by level, and produces the document."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from penstock.perf.generator.fleet import FleetError, fleet
from penstock.perf.generator.orders import GrpcCall, Load, Target, Tls, Window
from penstock.perf.payloads.preparing import prepare_payloads
from penstock.perf.reports.document import Client, Document, Level, Model, Offered

from . import environment, load_search
from .control import Control, ControlError, control_for
from .measuring import INTERRUPTED, OVER, UNSTABLE, Generator, LoadListener, measure, offered
from .model import ModelDescription, describe_model
from .options import Options, hidden
from .sampling import Mark, Watch

HTTP_PORT, GRPC_PORT = 8000, 8001
LEVELS = "trace_level"
"""The only trace setting with several values."""
CONTINUE_AFTER = {"", OVER, UNSTABLE}
"""How a level may end without ending the run."""


class SessionError(Exception):
    """The run cannot begin. The text is one line."""


class Listener(LoadListener):
    """Callbacks during a run, in addition to those of each level's measuring."""

    def on_run_start(self, document: Document, description: ModelDescription) -> None:
        """Handle the model to be driven, before the first level."""

    def on_message(self, line: str) -> None:
        """Handle a line about the input or the server."""

    def on_level_start(self, load: Offered) -> None:
        """Handle a level's load."""

    def on_level_end(self, level: Level) -> None:
        """Handle a finished level."""


class Listeners(Listener):
    """Several listeners, called in turn."""

    def __init__(self, *each: Listener) -> None:
        self._each = each

    def on_run_start(self, document: Document, description: ModelDescription) -> None:
        for each in self._each:
            each.on_run_start(document, description)

    def on_message(self, line: str) -> None:
        for each in self._each:
            each.on_message(line)

    def on_level_start(self, load: Offered) -> None:
        for each in self._each:
            each.on_level_start(load)

    def on_level_end(self, level: Level) -> None:
        for each in self._each:
            each.on_level_end(level)

    def on_start(self) -> None:
        for each in self._each:
            each.on_start()

    def on_window_boundary(self) -> None:
        for each in self._each:
            each.on_window_boundary()

    def on_progress(self, share: float) -> None:
        for each in self._each:
            each.on_progress(share)

    def on_window(self, window: Window, client: Client) -> None:
        for each in self._each:
            each.on_window(window, client)

    def is_interrupted(self) -> bool:
        return any(each.is_interrupted() for each in self._each)


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    options: Options
    document: Document
    model: ModelDescription


class Marks(Listener):
    """The server's side of each window. `is_interrupted`: whether to end early."""

    def __init__(self, watch: Watch, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        self._watch = watch
        self._is_interrupted = is_interrupted
        self._marks: list[Mark] = []

    def on_start(self) -> None:
        self._watch.begin()
        self._marks = []

    def on_window_boundary(self) -> None:
        self._marks.append(self._watch.mark())

    def on_window(self, window: Window, client: Client) -> None:
        self._watch.set_figure("throughput", client.requests_per_s)

    def is_interrupted(self) -> bool:
        return self._is_interrupted()

    def record_in(self, level: Level) -> None:
        """Store the observations in a level."""
        if level.settled:
            self._watch.record_in(level, self._marks[-1 - level.settled], self._marks[-1])


def profile(options: Options, listener: Listener | None = None) -> Document:
    """Run all levels.

    Failures after the first level has begun are in the document: `failed`, `interrupted`, and its levels' `ended`.
    Raises: SessionError, ControlError, DescriptionError, InputError, OSError if the run cannot begin.
    """
    listener = listener or Listener()
    aimed = target(options)
    control = control_for(aimed, dict(options.headers))
    model = describe_model(control, options.model, options.version, options.composing, options.inputs)
    _check(options, model)
    document = _document(options, aimed, model, control)
    if options.trace:
        control.trace({name: list(value) if name == LEVELS else value[0] for name, value in options.trace})
    with ExitStack() as stack:
        ready = stack.enter_context(
            prepare_payloads(model, options.input, aimed, control, headers=options.headers, slots=slots(options))
        )
        running = stack.enter_context(fleet(aimed, ready.payloads, max(options.processes, 1)))
        watch = stack.enter_context(Watch(control, model, aimed, options))
        document.machine["sharing"] = watch.sharing()
        listener.on_run_start(document, model)
        for line in (*ready.notes, *_warnings(options, document.server)):
            listener.on_message(line)
        _levels(_Run(options, document, model), running, Marks(watch), listener)
    return document


def _levels(run: _Run, running: Generator, marks: Marks, listener: Listener) -> None:
    options, document = run.options, run.document
    search = _search(options)
    value = next(search)
    window_listener = Listeners(marks, listener)
    try:
        while True:
            load = load_of(options, value, sequences=run.model.sequences)
            listener.on_level_start(offered(load))
            level = measure(running, load, options.rule, options.input.batch, window_listener)
            marks.record_in(level)
            document.levels.append(level)
            listener.on_level_end(level)
            if level.ended not in CONTINUE_AFTER:
                document.interrupted = level.ended == INTERRUPTED
                document.failed = "" if document.interrupted else level.ended
                return
            value = search.send(not level.ended)
    except StopIteration:
        return
    except (OSError, FleetError, ControlError) as error:
        document.failed = str(error)


def target(options: Options) -> Target:
    """Return the target of the requests. Raises: SessionError."""
    url = options.url or f"localhost:{GRPC_PORT if options.grpc else HTTP_PORT}"
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        port = parts.port or (GRPC_PORT if options.grpc else HTTP_PORT)
    except ValueError as error:
        raise SessionError(f"-u {url}: {error}") from error
    if not parts.hostname or parts.path.strip("/"):
        raise SessionError(f"-u {url}: wanted HOST:PORT")
    tls = options.tls or (Tls() if parts.scheme in {"https", "grpcs"} else None)
    secure = tls if options.grpc or parts.scheme == "https" else None
    if not options.grpc:
        return Target(parts.hostname, port, secure, v2=True)
    method = "ModelStreamInfer" if options.streaming else "ModelInfer"
    call = GrpcCall(
        f"/inference.GRPCInferenceService/{method}", options.headers, options.streaming, options.compression
    )
    return Target(parts.hostname, port, secure, call)


def slots(options: Options) -> int:
    """Return the most requests that will be in flight at once; 0: unknown."""
    if options.concurrency is None:
        return options.sequences
    return int(max(options.concurrency.start, options.concurrency.end)) if options.concurrency.end else 0


def load_of(options: Options, value: float, *, sequences: bool = False) -> Load:
    """Make the load of one level, a concurrency or a rate."""
    base = Load(connections=options.connections, seed=options.input.seed, requests=options.rule.total_requests)
    if options.concurrency is not None:
        return dataclasses.replace(base, concurrency=int(value))
    if sequences:  # one request of each in flight: two on two connections could overtake each other
        base = dataclasses.replace(base, sequences=options.sequences)
    if options.intervals is not None:
        return dataclasses.replace(base, intervals_us=intervals_us(options))
    return dataclasses.replace(base, rate_per_s=value, poisson=options.poisson)


def intervals_us(options: Options) -> tuple[float, ...]:
    """Read --request-intervals. Raises: SessionError."""
    path = options.intervals
    if path is None:
        return ()
    try:
        intervals = tuple(float(line) for line in path.read_text("utf-8").split())
    except (OSError, ValueError) as error:
        raise SessionError(f"--request-intervals {path}: {error}") from error
    if not intervals or not all(0 <= each < math.inf for each in intervals) or not sum(intervals):
        raise SessionError(f"--request-intervals {path}: wanted microseconds above 0, one in each line")
    return intervals


def _search(options: Options) -> load_search.Search:
    visited = options.concurrency or options.rate
    if visited is None or options.intervals is not None:
        return load_search.single(0.0)
    if options.binary_search:
        return load_search.halving(visited, integer=options.concurrency is not None)
    return load_search.linear(visited)


def _check(options: Options, model: ModelDescription) -> None:
    """Reject settings that are incompatible with the model. Raises: SessionError."""
    intervals_us(options)
    if options.input.batch > 1 and not model.max_batch_size:
        raise SessionError("can not specify batch size > 1 as the model does not support batching")
    if model.sequences and options.input.batch > 1:
        raise SessionError("can not specify batch size > 1 when using a sequence model")
    if model.decoupled and not options.streaming:
        raise SessionError("decoupled models must be run with --streaming and -i grpc")
    id_count = options.input.sequence_ids[1]
    if model.sequences and id_count and id_count < slots(options):
        raise SessionError(
            "sequence id range specified is smaller than the maximum possible number of sequences, "
            "sequence id collision may occur."
        )


def _document(options: Options, aimed: Target, model: ModelDescription, control: Control) -> Document:
    server = _server(control)
    return Document(
        document_model(model, model.config),
        list(options.command),
        dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        f"{aimed.host}:{aimed.port}",
        "grpc" if aimed.grpc else "http",
        batch=options.input.batch,
        server=server,
        machine=environment.machine(),
        versions=environment.versions(server),
        options=_changed_options(options),
        target_ms=options.target_ms,
    )


def document_model(model: ModelDescription, config: dict[str, Any]) -> Model:
    """Return a model as a document holds it, with one of its configurations."""
    return Model(
        model.name,
        model.version,
        model.platform,
        model.max_batch_size,
        [dataclasses.asdict(each) for each in model.inputs],
        [dataclasses.asdict(each) for each in model.outputs],
        config,
        environment.fingerprint(config),
    )


def _warnings(options: Options, server: dict[str, Any]) -> list[str]:
    """Warn of what the server may not support; some support it without listing it."""
    binary = options.input.binary_input and options.input.shared_memory == "none" and not options.grpc
    if not binary or "binary_tensor_data" in server.get("extensions", ["binary_tensor_data"]):
        return []
    flags = "--input-tensor-format json --output-tensor-format json"
    return [f"The server does not list the extension binary_tensor_data. Should requests fail: {flags}"]


def _server(control: Control) -> dict[str, Any]:
    try:
        return control.server()
    except ControlError:  # v2 servers need not have it
        return {}


def _changed_options(options: Options) -> dict[str, Any]:
    """Return the options that differ from the defaults."""
    options = dataclasses.replace(options, headers=tuple(map(hidden, options.headers)))
    usual = dataclasses.asdict(Options(options.model))
    return {
        name: value
        for name, value in dataclasses.asdict(options).items()
        if name not in {"model", "command"} and value != usual[name]
    }
