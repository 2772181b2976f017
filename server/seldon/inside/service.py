"""The service of a component's worker: constructs the user's class, and runs its calls.

Source: seldon-core 1.17.1, microservice.py: how a class is loaded, and in which order.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.ipc.channel import Channel
from penstock.server.seldon import parameters
from penstock.server.seldon.messages import CALL, ComponentDescription, Endpoint, PayloadKind
from penstock.server.workers.child import die_with_parent

if TYPE_CHECKING:
    from .endpoints import Rest

Reply = tuple[bytes, Sequence[Array | None] | None]

logger = logging.getLogger("seldon_core")

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LOG_FORMAT = "%(asctime)s - %(name)s:%(funcName)s:%(lineno)s - %(levelname)s:  %(message)s"
"""The original's, which components' own lines have too."""
_HEALTH_METHODS = ("health_status_raw", "health_status", "metrics", "tags")
_UNBATCHABLE_METHODS = ("predict_rest", "predict_grpc", "predict_raw")


def open_service(settings: dict[str, Any], channel: Channel) -> SeldonInside:
    """Import the component, construct it, and load it. Raises: InferError (INVALID) if that fails."""
    if settings["folder"] not in sys.path:
        sys.path.append(settings["folder"])
    from .seldon_core_classes import SeldonMicroserviceException

    level = os.environ.get("SELDON_LOG_LEVEL", "INFO")
    logging.basicConfig(level=level if level in _LEVELS else "INFO", format=_LOG_FORMAT)
    try:
        return SeldonInside(_construct(settings), settings, channel)
    except parameters.BadParameterError as error:
        raise InferError(Code.INVALID, str(error)) from None
    except BaseException as error:  # noqa: BLE001 - whatever it is, there is no component
        message = f"component '{settings['component']}' cannot be opened: {type(error).__name__}"
        with contextlib.suppress(Exception):  # producing its text runs user code, too
            traceback.print_exception(error)
            message += f": {error.message if isinstance(error, SeldonMicroserviceException) else error}"
        raise InferError(Code.INVALID, message) from None


def _construct(settings: dict[str, Any]) -> Any:
    """Make the user's object: of class Name in the module Name, or of package.module.Class."""
    module, _, name = settings["component"].rpartition(".")
    arguments = parameters.read(settings.get("parameters", "[]"))
    found = importlib.import_module(module or name)
    return getattr(found, name)(**arguments)


class SeldonInside:
    """One component, which serves REST and gRPC. Threads: the main one."""

    concurrent_messages = False

    def __init__(self, user: Any, settings: dict[str, Any], channel: Channel | None = None) -> None:
        from .component import Component
        from .endpoints import Rest
        from .metadata import metadata_of

        custom = getattr(user, "custom_service", None)
        if callable(custom) and settings.get("custom_service", True):
            _run_in_process(custom, channel)
        metadata = metadata_of(user)
        component = Component(user, strict=settings.get("strict", True))
        self._rest = Rest(component)
        _load(user)
        self.description = _describe(self._rest, metadata)
        answer_in_context = self._rest.answer_in_context
        self._answers: list[Callable[[Endpoint, bytes], bytes]] = [
            partial(answer_in_context, PayloadKind.JSON), partial(answer_in_context, PayloadKind.HTTP), self._grpc,
        ]  # fmt: skip
        self._rows: Any = None

    def on_open(self) -> Reply:
        """Return the component's description."""
        return self.description.write(), None

    def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Reply:
        """Run one call."""
        if kind == CALL:
            try:
                return self._answers[body[1]](_ENDPOINTS[body[0]], body[2:]), None
            except BaseException:  # usually sys.exit
                self._rest.component.recorded = []
                raise
        if self._rows is None:
            from .rows import RowRunner

            self._rows = RowRunner(self._rest.component, self._rest)
        reply: Reply = self._rows.call(kind, body, arrays)
        return reply

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Ignore it: the server sends no notifications."""

    def close(self) -> None:
        """Close the event loop on which results were awaited."""
        self._rest.component.close()

    def _grpc(self, endpoint: Endpoint, payload: bytes) -> bytes:
        from .protobuf import answer

        self._answers[PayloadKind.PROTO] = answer_grpc = partial(answer, self._rest.component)
        return answer_grpc(endpoint, payload)


def _load(user: Any) -> None:
    """Call load(), if there is one. Errors that the original took for its absence are logged, not raised."""
    load = getattr(user, "load", None)
    if load is None:
        return
    try:
        load()
    except (NotImplementedError, AttributeError):
        logger.warning("load() failed; the component is served anyway, as by seldon-core", exc_info=True)


def _describe(rest: Rest, metadata: dict[str, Any] | None) -> ComponentDescription:
    """Describe a component that is loaded."""
    from .component import is_inherited

    component, user = rest.component, rest.component.user
    metadata_json, page = None, b""
    if metadata is not None:
        try:
            page = rest.writer.write(metadata)
            metadata_json = json.loads(page)
        except (TypeError, ValueError):
            logger.exception("The metadata cannot be written as JSON")
    wraps_calls = rest.blueprints is not None and rest.blueprints.wraps_calls
    health = ""
    if not wraps_calls and all(is_inherited(name, user) for name in _HEALTH_METHODS):
        health = rest.empty_answer(Endpoint.HEALTH).decode()
    batches = (
        not wraps_calls
        and not rest.is_passthrough
        and hasattr(user, "predict")
        and all(is_inherited(name, user) for name in _UNBATCHABLE_METHODS)
    )
    takes_meta, reads_request = component.takes_meta(Endpoint.PREDICT), rest.request_app is not None
    return ComponentDescription(metadata_json, health, batches, takes_meta, page.decode(), reads_request)


def _run_in_process(custom: Callable[[], Any], channel: Channel | None) -> None:
    """Run custom_service() in a process of its own, which ends with this one."""
    descriptor = channel.fileno() if channel is not None else -1

    def run(parent: int) -> None:
        die_with_parent(parent)
        if descriptor >= 0:
            os.close(descriptor)  # so that the server notices the end of this worker while the service still runs
        custom()

    multiprocessing.get_context("fork").Process(target=run, args=(os.getpid(),), daemon=True).start()


_ENDPOINTS = tuple(Endpoint)
