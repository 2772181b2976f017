"""Components with raw methods, and with the legacy methods before them."""

import json

from google.protobuf import json_format
from seldon_core.proto import prediction_pb2
from seldon_core.flask_utils import SeldonMicroserviceException
from seldon_core.user_model import SeldonNotImplementedError

METRIC = {"type": "COUNTER", "key": "raw_counter", "value": 1}
REPLIES = {
    "dict": {"data": {"ndarray": [[1]]}},
    "unsorted": {"z": 1, "a": {"y": 1, "b": 2}},
    "empty": {},
    "list": [1, {"a": None}],
    "text": "just text",
    "number": 1.5,
    "true": True,
    "null": None,
    "status-400": {"status": {"code": 400, "info": "mine"}},
    "status-418": {"strData": "x", "status": {"code": 418}},
    "status-204": {"status": {"code": 204}},
    "status-minus": {"status": {"code": -1}},
    "status-zero": {"status": {"code": 0}},
    "status-1000": {"status": {"code": 1000}},
    "status-text": {"status": {"code": "409"}},
    "status-phrase": {"status": {"code": "409 WELL WELL"}},
    "status-null": {"status": {"code": None}},
    "status-float": {"status": {"code": 404.0}},
    "status-of-no-code": {"status": {"info": "x"}},
    "status-empty": {"status": {}},
    "status-is-null": {"status": None},
    "status-is-text": {"status": "code"},
    "status-is-list": {"status": ["code"]},
    "meta-null": {"meta": None},
    "meta-text": {"meta": "x"},
    "metrics": {"meta": {"metrics": [dict(METRIC)]}, "strData": "x"},
    "metrics-of-no-key": {"meta": {"metrics": [{"value": 1}]}},
    "metrics-of-no-type": {"meta": {"metrics": [{"key": "untyped", "value": 2}]}},
    "metrics-tagged": {"meta": {"metrics": [{**METRIC, "tags": {"a": "b"}}]}},
    "unspeakable": {"a": {1}},
}


def _name(request, path=("meta", "tags", "give")):
    if isinstance(request, bytes):
        return request.decode()
    if not isinstance(request, (dict, list)):
        return json_format.MessageToDict(request)["meta"]["tags"]["give"]
    if isinstance(request, list):
        return request[0]
    for part in path:
        request = request[part]
    return request


def _reply(request):
    """Answers JSON with JSON and a message with a message, as seldon-core requires."""
    name = _name(request)
    if name == "raise":
        raise ValueError("raw")
    if name == "unimplemented":
        raise SeldonNotImplementedError("raw is not for this")
    if name == "seldon":
        raise SeldonMicroserviceException("refused", status_code=422, reason="RAW")
    if name == "message":
        return prediction_pb2.SeldonMessage(strData="a message")
    if name == "echo":
        return request
    reply = REPLIES[name]
    if isinstance(request, prediction_pb2.SeldonMessage):
        return json_format.ParseDict(reply, prediction_pb2.SeldonMessage())
    return json.loads(json.dumps(reply)) if name != "unspeakable" else reply


class Raw:
    def predict_raw(self, request):
        return _reply(request)

    def predict(self, X, names, meta=None):
        return ["not raw", str(names)]

    def transform_input_raw(self, request):
        return _reply(request)

    def transform_output_raw(self, request):
        return _reply(request)

    def route_raw(self, request):
        return _reply(request)

    def route(self, X, names):
        return 3

    def aggregate_raw(self, request):
        kind = type(request).__name__
        if isinstance(request, prediction_pb2.SeldonMessageList):
            return prediction_pb2.SeldonMessage(strData=kind)
        first = request[0] if isinstance(request, list) else request["seldonMessages"][0]
        if first == "raise":
            raise ValueError("raw aggregate")
        return {"strData": kind, "first": first}

    def send_feedback_raw(self, feedback):
        name = feedback.request.strData
        if name == "raise":
            raise ValueError("raw feedback")
        if name == "unimplemented":
            raise SeldonNotImplementedError("raw is not for this")
        if name == "dict":
            return {"strData": "x"}
        if name == "null":
            return None
        message = prediction_pb2.SeldonMessage(strData=type(feedback).__name__)
        if name == "metrics":
            message.meta.metrics.add(key="feedback_gauge", type=1, value=2.5)
            message.meta.metrics.add(key="feedback_counter", value=1)
        return message

    def health_status_raw(self):
        return {"well": ["raw"], "a": None}


class RawHealthInAMessage:
    def health_status_raw(self):
        return prediction_pb2.SeldonMessage(strData="a message")

    def predict_raw(self, msg):
        """Returns the other kind: JSON for a message, and a message for JSON."""
        if isinstance(msg, prediction_pb2.SeldonMessage):
            return {"strData": "a dict"}
        return prediction_pb2.SeldonMessage(strData="a message")


class Legacy:
    """The legacy methods before the raw ones."""

    def predict_rest(self, request):
        return {"predict_rest": request}

    def predict_grpc(self, request):
        return prediction_pb2.SeldonMessage(strData="predict_grpc")

    def predict_raw(self, request):
        raise RuntimeError("never asked")

    def transform_input_rest(self, request):
        return {"transform_input_rest": request} if isinstance(request, dict) else request

    def transform_output_grpc(self, request):
        return {"transform_output_grpc": request} if isinstance(request, dict) else request

    def route_rest(self, request):
        return [["route_rest"]] if isinstance(request, dict) else request

    def aggregate_grpc(self, request):
        return {"aggregate_grpc": request} if isinstance(request, (dict, list)) else request.seldonMessages[0]

    def send_feedback_rest(self, request):
        return {"strData": type(request).__name__ + " " + request.replace("\n", "").replace(" ", "")}


class LegacyOverGrpc:
    def predict_grpc(self, request):
        return prediction_pb2.SeldonMessage(strData="predict_grpc")

    def transform_output_rest(self, request):
        return "transform_output_rest"

    def transform_input_grpc(self, request):
        return {"transform_input_grpc": 1} if isinstance(request, dict) else request

    def route_grpc(self, request):
        return {"route_grpc": 1} if isinstance(request, dict) else request

    def aggregate_rest(self, request):
        return {"aggregate_rest": 1} if isinstance(request, (dict, list)) else request.seldonMessages[0]

    def send_feedback_grpc(self, request):
        return {"strData": type(request).__name__, "meta": {"puid": "p"}}


class Passed:
    """For PAYLOAD_PASSTHROUGH: bytes in, bytes out."""

    def predict_raw(self, request):
        if request == b"text":
            return "a text"
        if request == b"dict":
            return {"a": 1}
        if request == b"list":
            return ["one", "two"]
        if request == b"null":
            return None
        if request == b"raise":
            raise ValueError("passed")
        return repr(request).encode()
