"""Serving: one model of a live server, loaded with one setting after another, and restored at the end.

It uses the model repository extension, so the server's model control mode must be explicit.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from penstock.perf.profiling.control import ControlError, RefusedError

from . import knobs
from .knobs import ORIGINAL, Setting

READY_TIMEOUT_S = 60.0
_POLL_S = 0.05
_REASON_CHARACTERS = 300


class ServingError(Exception):
    """The model cannot be tuned, or the server failed. The text is one line."""


class RejectedSettingError(Exception):
    """The server rejected a setting. The text is its reason, on one line."""


class Server(Protocol):
    """The methods of a Control that are needed here. Raises: ControlError; RefusedError if the server answered."""

    def config(self, model: str, version: str = "") -> dict[str, Any]:
        """Return a model's configuration."""
        ...

    def ready(self, model: str = "", version: str = "") -> bool:
        """Return whether a model is ready."""
        ...

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """Reload a model; without `config`, as in its repository."""
        ...


class ServedModel:
    """A model that is served with one setting at a time. `config`: the original, without what the server completes.

    `setting` None: what is served now is unknown. Raises: ServingError if it cannot be tuned.
    """

    def __init__(self, server: Server, model: str, wait: Callable[[float], None] = time.sleep) -> None:
        self._server = server
        self._model = model
        self._wait = wait
        self._original = self._tunable_config()
        self.config = knobs.reloadable(self._original)
        self._is_from_repository = self._reload()
        self.setting: Setting | None = ORIGINAL

    def _tunable_config(self) -> dict[str, Any]:
        config = self._server.config(self._model)
        if not config:
            raise ServingError(f"model '{self._model}': the server does not tell its configuration")
        if config.get("ensemble_scheduling") is not None:
            raise ServingError(f"model '{self._model}' is an ensemble: tune the models that it is made of")
        return config

    def _reload(self) -> bool:
        """Reload it as in the repository. Returns: whether that is what was served. Nothing else has been changed."""
        try:
            self._server.load(self._model)
        except RefusedError as error:
            raise ServingError(
                f"{error}. Settings are tried by loading the model anew: start the server with"
                f" --model-control-mode=explicit --load-model={self._model}"
            ) from error
        self._await_ready()
        if self._server.config(self._model) == self._original:
            return True
        self._server.load(self._model, self.config)  # what was served had been loaded by a request
        self._await_ready()
        return False

    def load(self, setting: Setting) -> None:
        """Serve a setting, reloading in any case. Raises: RejectedSettingError, ControlError."""
        self.setting = None
        use_repository = setting == ORIGINAL and self._is_from_repository
        try:
            self._server.load(self._model, None if use_repository else self.config_of(setting))
        except RefusedError as error:
            raise RejectedSettingError(_reason(error)) from error
        self._await_ready()
        reported = self._server.config(self._model)
        for knob, value in setting:
            actual = knobs.value_of(reported, ORIGINAL, knob)
            if actual != value:
                raise RejectedSettingError(f"loaded, but the server reports {knob} {actual}")
        self.setting = setting

    def config_of(self, setting: Setting) -> dict[str, Any]:
        """Return the complete configuration of a setting."""
        return knobs.apply_setting(self.config, setting)

    def try_config(self, config: Mapping[str, Any]) -> str:
        """Load a configuration as written to a file. Returns: why the server rejects it, or ""."""
        self.setting = None
        try:
            self._server.load(self._model, config)
            self._await_ready()
        except (ControlError, RejectedSettingError) as error:
            return _reason(error)
        return ""

    def restore(self) -> str:
        """Serve what was served before. Returns: why that failed, or ""."""
        try:
            self._server.load(self._model, None if self._is_from_repository else self.config)
            self._await_ready()
            config = self._server.config(self._model)
        except (ControlError, RejectedSettingError) as error:
            return _reason(error)
        self.setting = ORIGINAL
        is_restored = config == self._original
        return "" if is_restored else "it is served, but not as it was before: the files of its repository have changed"

    def _await_ready(self) -> None:
        for _ in range(int(READY_TIMEOUT_S / _POLL_S)):
            if self._server.ready(self._model):
                return
            self._wait(_POLL_S)
        raise RejectedSettingError(f"not ready within {READY_TIMEOUT_S:g} s")


@contextmanager
def restored_afterwards(
    served: ServedModel, applied: Callable[[], bool], report_progress: Callable[[str], None]
) -> Iterator[None]:
    """Restore the model when the block ends, in any way, unless a result was `applied`.

    A Ctrl-C does not prevent it.
    """
    try:
        yield
    finally:
        if not applied():
            with _signals_ignored():
                reason = served.restore()
            report_progress(
                f"error: the configuration was not restored: {reason}"
                if reason
                else "the configuration is as it was before"
            )


@contextmanager
def _signals_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _REASON_CHARACTERS else text[:_REASON_CHARACTERS] + "..."
