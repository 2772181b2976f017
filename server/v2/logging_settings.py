"""Logging settings: what the process logs, read and changed over the network while it runs.

Made by the composition root; used by its own HTTP endpoint and by gRPC's LogSettings. The log destination cannot be
changed over the network.
Source: Triton server, http_server.cc and grpc_server.cc (names, order and texts).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.backends.errors import Code, InferError
from penstock.server.settings import Settings
from penstock.server.telemetry.logs import LogLevels

from .parsing import parse
from .routes import MAX_JSON_DEPTH, Route, json_answer, read_body

PATH = "/v2/logging"
_FILE_TEXT = "log file location can not be updated through network protocol"
_UINT32_MAX = 2**32 - 1
_BOOLEANS = ("log_info", "log_warning", "log_error")
_FORMATS = ("default", "ISO8601")
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "log_file": {"type": "string", "readOnly": True},
        **{name: {"type": "boolean"} for name in _BOOLEANS},
        "log_verbose_level": {"type": "integer", "minimum": 0},
        "log_format": {"type": "string", "enum": list(_FORMATS)},
    },
}


def apply_without_logs(levels: LogLevels) -> None:
    """Apply what can be applied inside another program, which owns its logging: the level of Penstock's loggers."""
    logging.getLogger("penstock").setLevel(levels.lowest)


class LogSettings:
    """The logging settings. `apply` puts them into effect; the process shell replaces it, if there is one."""

    def __init__(self, settings: Settings, apply: Callable[[LogLevels], None] | None = None) -> None:
        self._file = settings.log_file
        self._levels = LogLevels.from_settings(settings)
        self.apply = apply or apply_without_logs

    def read(self) -> dict[str, bool | int | str]:
        """Return every setting, in Triton's order."""
        levels = self._levels
        return {
            "log_file": self._file,
            "log_info": levels.info,
            "log_warning": levels.warning,
            "log_error": levels.error,
            "log_verbose_level": levels.verbose,
            "log_format": levels.format,
        }

    def update(self, changes: Mapping[str, Any]) -> None:
        """Change settings, all or none; None leaves one unchanged, as in Triton.

        Raises: InferError (UNSUPPORTED: the log file; INVALID).
        """
        checked: dict[str, Any] = {}
        for name, value in changes.items():
            if value is not None:
                checked[name.removeprefix("log_")] = _check_setting(name, value)
        levels = self._levels
        updated = LogLevels(
            info=checked.get("info", levels.info),
            warning=checked.get("warning", levels.warning),
            error=checked.get("error", levels.error),
            verbose=checked.get("verbose_level", levels.verbose),
            format=checked.get("format", levels.format),
        )
        if updated != levels:
            self._levels = updated
            self.apply(updated)

    # -- HTTP --------------------------------------------------------------------------------------------------

    def routes(self) -> tuple[Route, ...]:
        """Return the endpoints."""
        return (
            Route("GET", (PATH,), self.answer, "What the server logs", _SCHEMA),
            Route("POST", (PATH,), self.change, "Change what the server logs", _SCHEMA, _SCHEMA, (400, 501)),
        )

    async def answer(self, request: Request) -> Response:
        """Answer with the settings."""
        return json_answer(self.read())

    async def change(self, request: Request) -> Response:
        """Change the settings, and answer with the new values."""
        self.update(settings_object(await read_body(request)))
        return json_answer(self.read())


def settings_object(body: bytes) -> dict[str, Any]:
    """Parse the settings in a request: an object, possibly empty.

    Raises: InferError (INVALID).
    """
    if not body.strip():
        return {}
    settings = parse(body, MAX_JSON_DEPTH, simd=False)
    if not isinstance(settings, dict):
        raise InferError(Code.INVALID, "settings must be an object such as {}")
    return settings


def _check_setting(name: str, value: Any) -> Any:
    if name == "log_file":
        raise InferError(Code.UNSUPPORTED, _FILE_TEXT)
    if name in _BOOLEANS:
        if type(value) is not bool:
            raise InferError(Code.INVALID, f"expect boolean for '{name}'")
    elif name == "log_verbose_level":
        if type(value) is not int or not 0 <= value <= _UINT32_MAX:
            raise InferError(Code.INVALID, f"expect int32 for '{name}'")
    elif name == "log_format":
        if not isinstance(value, str):
            raise InferError(Code.INVALID, f"expect string for '{name}'")
        if value not in _FORMATS:
            raise InferError(Code.INVALID, f"invalid argument for log_format, got: {value}")
    else:
        raise InferError(Code.INVALID, f"unknown log setting '{name}'")
    return value
