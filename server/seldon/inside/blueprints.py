"""Blueprints: runs a component's `model_error_handler`, a Flask blueprint, in Flask, which is imported only for it.

An app with the blueprint and the original's two error handlers answers each failed call. If the blueprint has more than
error handlers, every call is made within the app.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.server.seldon.environ import read_boolean
from penstock.server.seldon.messages import Endpoint, PayloadKind

from .answers import JsonWriter
from .component import MISSING
from .errors import failure
from .seldon_core_classes import SeldonMicroserviceException

logger = logging.getLogger("seldon_core")

PATHS = (
    "/predict",
    "/send-feedback",
    "/transform-input",
    "/transform-output",
    "/route",
    "/aggregate",
    "/health/status",
)
"""The URLs that handlers see, by Endpoint."""
SETTINGS = (
    "DEBUG", "EXPLAIN_TEMPLATE_LOADING", "JSONIFY_PRETTYPRINT_REGULAR", "JSON_AS_ASCII", "JSON_SORT_KEYS",
    "PROPAGATE_EXCEPTIONS", "PRESERVE_CONTEXT_ON_EXCEPTION", "SESSION_COOKIE_HTTPONLY", "SESSION_COOKIE_SECURE",
    "SESSION_REFRESH_EACH_REQUEST", "TEMPLATES_AUTO_RELOAD", "TESTING", "TRAP_HTTP_EXCEPTIONS",
    "TRAP_BAD_REQUEST_ERRORS", "USE_X_SENDFILE",
)  # fmt: skip
"""The settings of Flask's that the environment may set, with the prefix FLASK_."""
_JSON = "application/json"
_OWN_HEADERS = ("content-type", "content-length")
_BODY_HEADERS = (*_OWN_HEADERS, "transfer-encoding", "content-encoding")
"""Request headers that no longer describe the body."""

Page = tuple[int, bytes, bytes]
"""Status, body, and header lines in the form of messages.ANSWER."""


def blueprints_of(user: Any, writer: JsonWriter) -> Blueprints | None:
    """Make the app for a component's `model_error_handler`; None if it has none."""
    blueprint = getattr(user, "model_error_handler", MISSING)
    if blueprint is not MISSING:
        return Blueprints(blueprint, writer)
    if "flask" in sys.modules:
        Blueprints(None, writer)  # its app stays the current one, for a component that calls flask.jsonify
    return None


def request_app(writer: JsonWriter) -> Blueprints | None:
    """Make the app that provides `flask.request` during calls; None if no module of the component's folder can read it.

    Many components read headers from it, which seldon-core does not pass to methods.
    """
    if (flask := sys.modules.get("flask")) is None:
        return None
    folder = os.path.join(os.path.realpath(os.getcwd()), "")  # noqa: PTH109, PTH118 - compared with names of files
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")  # `__dict__` does not trigger lazy modules
        is_own = isinstance(file, str) and os.path.realpath(file).startswith(folder)
        if is_own and any(each is flask or each is flask.request for each in list(vars(module).values())):
            return Blueprints(None, writer)
    return None


class Blueprints:
    """A Flask app for the calls of a component. `wraps_calls`: it must wrap all calls, not only failed ones.

    Threads: one call at a time.
    """

    def __init__(self, blueprint: Any, writer: JsonWriter) -> None:
        import flask

        self._writer = writer
        self._view: Callable[[], tuple[int, bytes]] = _no_view
        app = flask.Flask(__name__, static_folder=None)
        for setting in SETTINGS:
            enabled = read_boolean(os.environ, f"FLASK_{setting}")
            if enabled is not None:
                app.config[setting] = enabled
        writer.configure(app.json)
        if blueprint is not None:
            app.register_blueprint(blueprint)
        hooks = (app.before_request_funcs, app.after_request_funcs, app.teardown_request_funcs)
        self.wraps_calls = any(each.get(None) for each in (*hooks, app.url_value_preprocessors))
        if any(True for _ in app.url_map.iter_rules()):
            logger.warning("model_error_handler has URLs of its own: they are not served")
        app.register_error_handler(Exception, self._handle_error)
        app.register_error_handler(SeldonMicroserviceException, self._handle_error)
        for endpoint, path in enumerate(PATHS):
            app.add_url_rule(path, f"seldon_{endpoint}", self._call_view, methods=["GET", "POST"])
        # user code may have been written for Flask's requests, and build its answers with jsonify
        self._context = app.app_context()
        self._context.push()
        self._app = app
        self._client = app.test_client()
        self._response = flask.Response

    def run(
        self, endpoint: Endpoint, payload_kind: PayloadKind, payload: bytes, view: Callable[[], tuple[int, bytes]]
    ) -> Page:
        """Make a call within a request of Flask's; `view` returns its status and body."""
        self._view = view
        try:
            response = self._client.open(
                **_flask_arguments(endpoint, payload_kind, payload) | {"path": PATHS[endpoint]}
            )
        finally:
            self._view = _no_view
            self._clear_g()
        headers = [(name, value) for name, value in response.headers if name.lower() not in _OWN_HEADERS]
        content_type = response.headers.get("content-type", "")
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        if lines or content_type != _JSON:
            lines = f"{content_type}\r\n{lines}"
        return response.status_code, response.get_data(), lines.encode("latin-1", "replace")

    @contextmanager
    def request_context(self, endpoint: Endpoint, payload_kind: PayloadKind, payload: bytes) -> Iterator[None]:
        """Make `flask.request` that of a call."""
        try:
            with self._app.test_request_context(**_flask_arguments(endpoint, payload_kind, payload)):
                yield
        finally:
            self._clear_g()

    def _clear_g(self) -> None:
        # the app's context outlives the call, and with it `flask.g`, which in Flask belongs to one request
        vars(self._context.g).clear()

    def error_page(self, endpoint: Endpoint, payload_kind: PayloadKind, payload: bytes, error: Exception) -> Page:
        """Return the answer to a failed call."""

        def view() -> tuple[int, bytes]:
            raise error

        return self.run(endpoint, payload_kind, payload, view)

    def _call_view(self) -> Any:
        status, body = self._view()
        return self._response(body, status, mimetype=_JSON)

    def _handle_error(self, error: Exception) -> Any:
        status, message = failure(error)
        return self._response(self._writer.write(message), status, mimetype=_JSON)


def _flask_arguments(endpoint: Endpoint, payload_kind: PayloadKind, payload: bytes) -> dict[str, Any]:
    """Return Flask's arguments for a call."""
    head: dict[str, Any] = {"method": "GET" if endpoint is Endpoint.HEALTH else "POST", "type": _JSON, "query": ""}
    if payload_kind is PayloadKind.HTTP:
        line, _, payload = payload.partition(b"\n")
        head = json.loads(line)
    return {
        "path": head.get("path", PATHS[endpoint]),
        "method": head["method"],
        "query_string": head["query"],
        "data": payload,
        "content_type": head["type"] or None,
        "headers": [(name, value) for name, value in head.get("headers", ()) if name not in _BODY_HEADERS],
    }


def _no_view() -> tuple[int, bytes]:
    raise LookupError("no call is in progress")
