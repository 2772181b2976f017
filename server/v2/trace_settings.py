"""Trace settings: which requests are traced, read and changed over the network while the server runs.

Made by the composition root; used by its own HTTP endpoints and by gRPC's TraceSetting. The trace destination cannot be
changed over the network.
Source: Triton server, http_server.cc, grpc_server.cc and tracer.cc (names, order, fallbacks and texts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.backends.errors import Code, InferError
from penstock.server.tracing.config import INT32_MAX, LEVELS, OFF, OPENTELEMETRY, UINT32_MAX, Sampling, TraceConfig
from penstock.server.tracing.tracer import Tracer

from .logging_settings import settings_object
from .routes import Route, json_answer, model_and_version, read_body

PATHS = ("/v2/trace/setting", "/v2/models/{model}/trace/setting")
_FILE_TEXT = "trace file location can not be updated through network protocol"
_MODE_TEXT = "trace mode can not be updated through network protocol"
_BOUNDS = {"trace_rate": (0, UINT32_MAX), "trace_count": (-1, INT32_MAX), "log_frequency": (0, UINT32_MAX)}
_FIELDS = {"trace_level": "level", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "trace_level": {"type": "array", "items": {"type": "string", "enum": [OFF, *LEVELS]}},
        **{name: {"type": "string"} for name in ("trace_rate", "trace_count", "log_frequency")},
        **{name: {"type": "string", "readOnly": True} for name in ("trace_file", "trace_mode")},
    },
}


class TraceSettings:
    """Which requests are traced: global settings, and models with settings of their own.

    A setting not set for a model falls back to the global one, which falls back to the flags. `find_model` raises
    InferError for a name that is not served.
    """

    def __init__(self, config: TraceConfig, tracer: Tracer, find_model: Callable[[str], object]) -> None:
        self._config = config
        self._tracer = tracer
        self._find_model = find_model
        self._overrides: dict[str, set[str]] = {}
        self.on_change: Callable[[str, Mapping[str, Any]], None] = lambda _model, _changes: None
        """Called after each update."""

    def read(self, model: str = "") -> dict[str, list[str]]:
        """Return every setting of a model, or the global ones, in Triton's order.

        Raises: InferError (INVALID: no such model).
        """
        self._check_model(model)
        sampling, config = self._tracer.sampling(model), self._config
        settings = {
            "trace_level": list(sampling.level) or [OFF],
            "trace_rate": [str(sampling.rate)],
            "trace_count": [str(sampling.count)],
        }
        if config.mode == OPENTELEMETRY:
            settings["trace_mode"] = [config.mode]
            settings["url"] = [config.url]
            if config.resource:
                settings["resource"] = [f"{key}={value}" for key, value in config.resource]
            return settings | {name: [str(value)] for name, value in config.batching}
        settings["log_frequency"] = [str(sampling.log_frequency)]
        settings["trace_file"] = [config.file]
        settings["trace_mode"] = [config.mode]
        return settings

    def update(self, model: str, changes: Mapping[str, list[str] | None]) -> None:
        """Change settings, all or none; None or an empty list clears one.

        Raises: InferError (INVALID; UNSUPPORTED: the file or the mode).
        """
        self._check_model(model)
        new_values = {_field(name): _value(name, values or None) for name, values in changes.items()}
        if not new_values:
            return
        fallback = self._tracer.sampling("") if model else self._config.sampling
        planned = {model: self._merge(model, new_values, fallback)}
        if not model:
            others = [name for name in self._overrides if name]
            planned |= {name: self._merge(name, {}, planned[""][1]) for name in others}
        for name, (own_settings, sampling) in planned.items():
            has_own = bool(own_settings) or not name
            self._overrides[name] = own_settings
            if not has_own:
                del self._overrides[name]
            self._tracer.set_sampling(name, sampling if has_own else None)
        self.on_change(model, changes)

    def _merge(self, model: str, new_values: Mapping[str, Any], fallback: Sampling) -> tuple[set[str], Sampling]:
        """Merge the scope's earlier settings, the new ones, and the fallback for those that are unset."""
        own_settings = (self._overrides.get(model, set()) | new_values.keys()) - {
            name for name in new_values if new_values[name] is None
        }
        current = self._tracer.sampling(model)
        values = {name: new_values[name] if name in new_values else getattr(current, name) for name in own_settings}
        sampling = replace(fallback, **values)
        reason = self._config.rejection_reason(sampling)
        if reason:
            raise InferError(Code.INVALID, f"Attempting to set invalid trace setting :{reason}")
        return own_settings, sampling

    def _check_model(self, model: str) -> None:
        if model:
            try:
                self._find_model(model)
            except InferError:
                raise InferError(Code.INVALID, f"Request for unknown model : {model}") from None

    # -- HTTP --------------------------------------------------------------------------------------------------

    def routes(self) -> tuple[Route, ...]:
        """Return the endpoints."""
        return (
            Route("GET", PATHS, self.answer, "Which requests are traced", _SCHEMA, errors=(400,)),
            Route("POST", PATHS, self.change, "Change which requests are traced", _SCHEMA, _SCHEMA, (400, 501)),
        )

    async def answer(self, request: Request) -> Response:
        """Answer with the settings."""
        return self._answer(_model(request))

    async def change(self, request: Request) -> Response:
        """Change the settings, and answer with the new values."""
        model = _model(request)
        self.update(model, _lists(settings_object(await read_body(request))))
        return self._answer(model)

    def _answer(self, model: str) -> Response:
        settings = self.read(model)
        return json_answer(
            {name: values if name == "trace_level" else ",".join(values) for name, values in settings.items()}
        )


def _model(request: Request) -> str:
    return model_and_version(request)[0] if "model" in request.path_params else ""


def _lists(settings: Mapping[str, Any]) -> dict[str, list[str] | None]:
    """Convert JSON settings to the form of gRPC's: texts, the level in a list, null to clear."""
    lists: dict[str, list[str] | None] = {}
    for name, value in settings.items():
        values = value if name == "trace_level" else [value]
        if value is None:
            lists[name] = None
        elif isinstance(values, list) and all(isinstance(each, str) for each in values):
            lists[name] = values
        else:
            expected = "an array of strings" if name == "trace_level" else "a string"
            raise InferError(Code.INVALID, f"'{name}' must be {expected}, or null")
    return lists


def _field(name: str) -> str:
    if name == "trace_file":
        raise InferError(Code.UNSUPPORTED, _FILE_TEXT)
    if name == "trace_mode":
        raise InferError(Code.UNSUPPORTED, _MODE_TEXT)
    if name not in _FIELDS:
        raise InferError(Code.INVALID, f"unknown trace setting '{name}'")
    return _FIELDS[name]


def _value(name: str, values: Sequence[str] | None) -> Any:
    if values is None:
        return None
    if name == "trace_level":
        return _level(values)
    if len(values) != 1:
        raise InferError(Code.INVALID, f"expect only 1 value for '{name}'")
    text, (low, high) = values[0], _BOUNDS[name]
    try:
        number = int(text) if len(text) <= 32 else high + 1
    except ValueError:
        raise InferError(Code.INVALID, f"Unable to parse '{name}', got: {text}") from None
    if name == "trace_count" and number < low:
        raise InferError(Code.INVALID, f"Unable to parse '{name}'. Expecting value >= {low}, got: {text}")
    if not low <= number <= high:
        message = f"Unable to parse '{name}', value is out of range [ {low}, {high} ], got: {text}"
        raise InferError(Code.INVALID, message)
    return number


def _level(values: Sequence[str]) -> tuple[str, ...]:
    if OFF in values and len(values) > 1:
        raise InferError(Code.INVALID, f"Expect only one trace level '{OFF}' is specified")
    for each in values:
        if each not in (OFF, *LEVELS):
            raise InferError(Code.INVALID, f"unknown trace level '{each}', known: {OFF}, {', '.join(LEVELS)}")
    return tuple(name for name in LEVELS if name in values)
