"""Conversions of messages to and from JSON, dictionaries and arrays, which components and their clients call.

The code is in `penstock.server.seldon.inside`. Source: seldon-core 1.17.1.
"""

from __future__ import annotations

import base64  # noqa: F401 - this and others for `import *`, which also provided them
import json
import logging
import os
import sys  # noqa: F401
from collections.abc import Iterable
from typing import Any, Dict, List, Optional, Tuple, Union  # noqa: F401, UP035

import numpy as np  # noqa: F401
from google.protobuf import any_pb2, json_format  # noqa: F401
from google.protobuf.json_format import MessageToDict, ParseDict  # noqa: F401
from google.protobuf.struct_pb2 import ListValue  # noqa: F401

from .env_utils import NONIMPLEMENTED_MSG, get_image_name, get_model_name
from .flask_utils import SeldonMicroserviceException
from .lacking import lacking
from .proto import prediction_pb2
from .user_model import (  # noqa: F401
    SeldonComponent,
    client_class_names,
    client_custom_tags,
    client_feature_names,
)

logger = logging.getLogger(__name__)

__getattr__ = lacking(__name__, "setup_tracing")


def get_request_path() -> dict[str, str]:
    """Return the component's image by its name; {} if it is in no graph."""
    name = get_model_name()
    return {} if name == NONIMPLEMENTED_MSG else {name: get_image_name()}


def json_to_seldon_message(message_json: Any) -> Any:
    """Make a SeldonMessage. Raises: SeldonMicroserviceException."""
    return _parsed(prediction_pb2.SeldonMessage(), {} if message_json is None else message_json)


def json_to_seldon_messages(message_json: Any) -> Any:
    """Make a SeldonMessageList. Raises: SeldonMicroserviceException."""
    return _parsed(prediction_pb2.SeldonMessageList(), message_json)


def json_to_feedback(message_json: Any) -> Any:
    """Make a Feedback. Raises: SeldonMicroserviceException."""
    return _parsed(prediction_pb2.Feedback(), message_json)


def json_to_seldon_model_metadata(metadata_json: Any) -> Any:
    """Make a SeldonModelMetadata of the known fields. Raises: SeldonMicroserviceException."""
    try:
        return json_format.ParseDict(
            metadata_json or {}, prediction_pb2.SeldonModelMetadata(), ignore_unknown_fields=True
        )
    except json_format.ParseError as error:
        raise SeldonMicroserviceException(f"Invalid metadata: {error}") from error


def _parsed(message: Any, said: Any) -> Any:
    try:
        return json_format.ParseDict(said, message)
    except json_format.ParseError as error:
        raise SeldonMicroserviceException(f"Invalid JSON: {error}") from error


def seldon_message_to_json(message_proto: Any) -> Any:
    """Return the JSON form of a message: empty fields are omitted, and numbers other than int32 are float."""
    return json.loads(json_format.MessageToJson(message_proto))


def seldon_messages_to_json(message_protos: Any) -> Any:
    """Return the same for a SeldonMessageList."""
    return seldon_message_to_json(message_protos)


def feedback_to_json(message_proto: Any) -> Any:
    """Return the same for a Feedback."""
    return seldon_message_to_json(message_proto)


def getenv(*env_vars: str, default: Any = None) -> Any:
    """Return the first of these variables that is set."""
    return next((os.environ[name] for name in env_vars if name in os.environ), default)


def getenv_as_bool(*env_vars: str, default: Any = False) -> Any:
    """Return whether the first of these variables that is set is 1, t or true."""
    value = getenv(*env_vars)
    return default if value is None else value.lower() in {"1", "true", "t"}


# -- arrays in messages ----------------------------------------------------------------------------------------


def get_data_from_proto(request: Any) -> Any:
    """Return the payload of a SeldonMessage: an array, bytes, a text, a JSON value, or an Any.

    Raises: SeldonMicroserviceException for none of these; ValueError, TypeError.
    """
    from penstock.server.seldon.inside.proto_values import payload_of

    try:
        return payload_of(request)
    except LookupError as error:
        raise SeldonMicroserviceException(str(error)) from error


def get_meta_from_proto(request: Any) -> dict[str, Any]:
    """Return the meta of a SeldonMessage, without empty fields."""
    from penstock.server.seldon.inside.proto_values import meta_of

    return meta_of(request.meta)


def grpc_datadef_to_array(datadef: Any) -> Any:
    """Return the array of a DefaultData, an empty one if it has none. Raises: ValueError, TypeError."""
    from penstock.server.seldon.inside.proto_values import array_of

    return array_of(datadef)


def array_to_grpc_datadef(data_type: str, array: Any, names: Iterable[str] | None = ()) -> Any:
    """Make a DefaultData of an array: a tensor, a tftensor, or an ndarray for any other word. Raises: TypeError."""
    from penstock.server.seldon.inside.proto_bytes import datadef_of

    return datadef_of(data_type, array, () if names is None else names)


def array_to_list_value(array: Any, lv: Any = None) -> Any:
    """Make a ListValue of an array, or add its elements to one. Raises: TypeError."""
    from penstock.server.seldon.inside.proto_bytes import list_value_of

    made = list_value_of(array)
    if lv is None:
        return made
    lv.MergeFrom(made)
    return lv


def array_to_rest_datadef(data_type: str, array: Any, names: Any = ()) -> dict[str, Any]:
    """Return an array as the `data` of a JSON message: a tensor, a tftensor, or an ndarray for any other word."""
    from penstock.server.seldon.inside.payloads import datadef

    return datadef(data_type, array, names)


# -- messages in parts -----------------------------------------------------------------------------------------


def extract_request_parts_json(request: Any) -> tuple[Any, Any, Any, str]:
    """Return a JSON message's payload, its meta and `data` (None if missing), and the key of the payload.

    Raises: SeldonMicroserviceException, and Python's and numpy's exceptions for wrong values.
    """
    from penstock.server.seldon.inside.payloads import split_message

    return split_message(request)


def extract_request_parts(request: Any) -> tuple[Any, dict[str, Any], Any, str]:
    """Return the same for a SeldonMessage. Raises: SeldonMicroserviceException, ValueError, TypeError."""
    return get_data_from_proto(request), get_meta_from_proto(request), request.data, request.WhichOneof("data_oneof")


def extract_feedback_request_parts(request: Any) -> tuple[Any, Any, Any, float]:
    """Return a Feedback's DefaultData, its array, the true array, and the reward. Raises: ValueError, TypeError."""
    features, truth = grpc_datadef_to_array(request.request.data), grpc_datadef_to_array(request.truth.data)
    return request.request.data, features, truth, request.reward


def construct_response(  # noqa: PLR0913 - as the original's
    user_model: Any,
    is_request: bool,
    client_request: Any,
    client_raw_response: Any,
    meta: Any = None,
    custom_metrics: Any = None,
    runtime_tags: Any = None,
) -> Any:
    """Make the SeldonMessage that answers a SeldonMessage with a component's result.

    Raises: SeldonMicroserviceException, TypeError, ValueError.
    """
    from penstock.server.seldon.inside.component import Component
    from penstock.server.seldon.inside.protobuf import encode_answer

    made = prediction_pb2.SeldonMessage.FromString(
        encode_answer(
            Component(user_model), client_request, client_raw_response, meta, custom_metrics or [], runtime_tags
        )
    )
    if is_request and made.HasField("data"):
        made.data.names[:] = client_feature_names(user_model, client_request.data.names)
    return made


def construct_response_json(  # noqa: PLR0913 - as the original's
    user_model: Any,
    is_request: bool,
    client_request_raw: Any,
    client_raw_response: Any,
    meta: Any = None,
    custom_metrics: Any = None,
    runtime_tags: Any = None,
) -> Any:
    """Make the JSON message that answers another with a component's result.

    Raises: SeldonMicroserviceException for a result of an unsupported type.
    """
    from penstock.server.seldon.inside.answers import make_message
    from penstock.server.seldon.inside.component import Component

    component = Component(user_model)
    made = make_message(component, client_request_raw, client_raw_response, meta, custom_metrics or [], runtime_tags)
    if is_request and "data" in made:
        said = client_request_raw.get("data", {}).get("names", [])
        made["data"]["names"] = client_feature_names(user_model, said)
    return made
