"""The exception with which a component chooses its answer, and readers of requests. Source: seldon-core 1.17.1.

Flask is imported only by the functions that use it, since a component may lack it.
"""

from __future__ import annotations

import base64
import json
from typing import Any

ANNOTATIONS_FILE = "/etc/podinfo/annotations"
ANNOTATION_GRPC_MAX_MSG_SIZE = "seldon.io/grpc-max-message-size"
DEFAULT_ANNOTATION_REST_TIMEOUT = 5000
ANNOTATION_REST_TIMEOUT = "seldon.io/rest-timeout"


class SeldonMicroserviceException(Exception):  # noqa: N818 - a name of seldon-core's
    """Raised by a component to answer with a text, a reason and an HTTP status. Its own `str` is empty."""

    status_code = 400

    def __init__(
        self,
        message: Any,
        status_code: int | None = None,
        payload: Any = None,
        reason: str = "MICROSERVICE_BAD_DATA",
    ) -> None:
        Exception.__init__(self)
        self.message = message
        if status_code is not None:
            self.status_code = status_code
        self.payload = payload
        self.reason = reason

    def to_dict(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return {"status": {"status": 1, "info": self.message, "code": -1, "reason": self.reason}}


def get_multi_form_data_request() -> dict[str, Any]:
    """Return the message in the multipart form of Flask's current request."""
    from flask import request

    fields: dict[str, Any] = {
        name: text if name == "strData" else json.loads(text) for name, text in request.form.items()
    }
    for name, file in request.files.items():
        content = file.read()
        fields[name] = base64.b64encode(content) if name == "binData" else content.decode()
    return fields


def get_request(skip_decoding: bool = False) -> Any:
    """Return the message in Flask's current request, raw if `skip_decoding`. Raises: SeldonMicroserviceException."""
    from flask import request
    from werkzeug.exceptions import HTTPException

    if "multipart/form-data" in (request.content_type or ""):
        return get_multi_form_data_request()
    text = request.form.get("json") or request.args.get("json")
    if text:
        return text if skip_decoding else json.loads(text)
    if skip_decoding:
        return request.get_data()
    try:
        message = request.get_json()
    except HTTPException:
        message = None
    if message is None:
        raise SeldonMicroserviceException("Can't find JSON in data")
    return message


def jsonify(response: Any, skip_encoding: bool = False) -> Any:
    """Make a Flask response of a message, which is already bytes if `skip_encoding`."""
    from flask import current_app
    from flask import jsonify as flask_jsonify

    if skip_encoding:
        return current_app.response_class(response=response, status=200, mimetype="application/json")
    return flask_jsonify(response)
