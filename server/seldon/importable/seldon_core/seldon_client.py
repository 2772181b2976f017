"""A client of components, and of deployments behind a gateway, over REST and gRPC. Source: seldon-core 1.17.1.

All arguments except the messages of feedback are keywords. Failures of a call are reported in the result's `success`
and `msg`; wrong arguments raise. REST needs only the standard library, gRPC needs grpcio.
"""

from __future__ import annotations

import http.client
import json
import logging
import ssl as tls
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import numpy as np
from google.protobuf import any_pb2, json_format

from .lacking import lacking
from .proto import prediction_pb2
from .utils import (
    array_to_grpc_datadef,
    feedback_to_json,
    json_to_feedback,
    json_to_seldon_message,
    seldon_message_to_json,
)

_CALLS = ("{}_predict_seldon", "{}_predict_gateway", "{}_feedback_seldon", "{}_feedback_gateway")
_OF_COMPONENTS = ("seldon_message", "aggregate", "feedback")
__getattr__ = lacking(
    __name__,
    "explain_predict_gateway",
    *(call.format(way) for way in ("rest", "grpc") for call in _CALLS),
    *(f"microservice_api_{way}_{what}" for way in ("rest", "grpc") for what in _OF_COMPONENTS),
)

logger = logging.getLogger(__name__)

_MIB4 = 4 * 1024 * 1024
_DEFAULTS: dict[str, Any] = {
    "gateway": "ambassador", "transport": "rest", "namespace": None, "deployment_name": None,
    "payload_type": "tensor", "gateway_endpoint": "localhost:8003", "microservice_endpoint": "localhost:5000",
    "grpc_max_send_message_length": _MIB4, "grpc_max_receive_message_length": _MIB4, "channel_credentials": None,
    "call_credentials": None, "debug": False, "client_return_type": "dict", "ssl": None,
}  # fmt: skip
_OF_ANY = {
    "gateway", "transport", "deployment_name", "payload_type", "gateway_endpoint", "microservice_endpoint", "method",
    "shape", "namespace",
}  # fmt: skip
_OF_PAYLOAD = {"data", "bin_data", "str_data", "json_data", "custom_data", "names"}
_OF_PREDICT = {"gateway_prefix", "headers", "http_path", "meta", "client_return_type", "raw_data", "ssl"}
_OF_FEEDBACK = {"gateway_prefix", "client_return_type", "raw_request", "ssl"}
_VALUES = {
    "gateway": ("ambassador", "istio", "seldon"),
    "transport": ("rest", "grpc"),
    "method": ("predict", "route", "transform-input", "transform-output", "aggregate", "send-feedback", None),
    "client_return_type": ("proto", "dict"),
}
_RPCS = {
    "predict": ("Model", "Predict"), "transform-input": ("Generic", "TransformInput"),
    "transform-output": ("Generic", "TransformOutput"), "route": ("Generic", "Route"),
    "aggregate": ("Generic", "Aggregate"), "send-feedback": ("Generic", "SendFeedback"),
}  # fmt: skip


class SeldonClientException(Exception):  # noqa: N818 - a name of seldon-core's
    """Raised for a call whose arguments are invalid."""

    status_code = 400

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)
        self.message = message


class SeldonChannelCredentials:
    """How a gateway is reached over TLS: whether its certificate is verified, and the paths of PEM files."""

    def __init__(
        self,
        verify: bool = True,
        root_certificates_file: str | None = None,
        private_key_file: str | None = None,
        certificate_chain_file: str | None = None,
    ) -> None:
        self.verify = verify
        self.root_certificates_file = root_certificates_file
        self.private_key_file = private_key_file
        self.certificate_chain_file = certificate_chain_file


class SeldonCallCredentials:
    """A token sent with each call, as X-Auth-Token."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token


class _Outcome:
    """The outcome of a call."""

    def __init__(self, request: Any, response: Any, success: bool = True, msg: str = "") -> None:
        self.request = request
        self.response = response
        self.success = success
        self.msg = msg

    def __repr__(self) -> str:
        return f"Success:{self.success} message:{self.msg}\nRequest:\n{self.request}\nResponse:\n{self.response}"


class SeldonClientPrediction(_Outcome):
    """The outcome of a call with one message."""


class SeldonClientFeedback(_Outcome):
    """The outcome of feedback."""


class SeldonClientCombine(_Outcome):
    """The outcome of a call with several messages."""


class SeldonClient:
    """Makes calls. Each uses the client's configuration, except for the arguments it overrides."""

    def __init__(self, **said: Any) -> None:
        self.config = {**_DEFAULTS, **_known(said, set(_DEFAULTS))}
        if self.config["debug"]:
            logger.setLevel(logging.DEBUG)
            http.client.HTTPConnection.debuglevel = 1

    def predict(self, **said: Any) -> SeldonClientPrediction:
        """Request a prediction from a deployment."""
        words = self._words(said, _OF_ANY | _OF_PAYLOAD | _OF_PREDICT)
        request, payload = _predict_request(words)
        outcome = self._through_gateway(words, "Predict", "/predictions", request, payload)
        return SeldonClientPrediction(*outcome)

    def feedback(
        self,
        prediction_request: Any = None,
        prediction_response: Any = None,
        prediction_truth: Any = None,
        reward: float = 0,
        **said: Any,
    ) -> SeldonClientFeedback:
        """Send feedback to a deployment."""
        words = self._words(said, _OF_ANY | _OF_FEEDBACK)
        raw = words.get("raw_request")
        request = raw if isinstance(raw, prediction_pb2.Feedback) else json_to_feedback(raw) if raw else None
        if request is None:
            request = prediction_pb2.Feedback(
                request=prediction_request, response=prediction_response, reward=reward, truth=prediction_truth
            )
        payload = raw if isinstance(raw, dict) and raw else feedback_to_json(request)
        return SeldonClientFeedback(*self._through_gateway(words, "SendFeedback", "/feedback", request, payload))

    def explain(self, **said: Any) -> Any:
        """Raise SeldonClientException: only the original's client can call explainers."""
        raise SeldonClientException(
            "Penstock's replacement for seldon-core has no explain; to use the original: pip install seldon-core"
        )

    def microservice(self, **said: Any) -> Any:
        """Call the given `method` of a component, over its own port."""
        words = self._words(said, _OF_ANY | _OF_PAYLOAD | {"datas", "ndatas"})
        method = words.get("method")
        if method not in _RPCS or method == "send-feedback":
            raise SeldonClientException(f"Unknown method {method}")
        if method == "aggregate":
            datas = words.get("datas")
            if datas is None:
                datas = [_random(words) for _ in range(words["ndatas"])]
            messages = [_message({**words, **_payload(each)}) for each in datas]
            request = prediction_pb2.SeldonMessageList(seldonMessages=messages)
            return SeldonClientCombine(*self._to_component(words, method, request))
        return SeldonClientPrediction(*self._to_component(words, method, _message(words)))

    def microservice_feedback(
        self, prediction_request: Any = None, prediction_response: Any = None, reward: float = 0, **said: Any
    ) -> SeldonClientFeedback:
        """Send feedback to a component."""
        words = self._words(said, _OF_ANY)
        request = prediction_pb2.Feedback(request=prediction_request, response=prediction_response, reward=reward)
        return SeldonClientFeedback(*self._to_component(words, "send-feedback", request))

    def _words(self, said: dict[str, Any], known: set[str]) -> dict[str, Any]:
        """Return the arguments of one call. Raises: TypeError, SeldonClientException."""
        words = {**self.config, **{name: value for name, value in _known(said, known).items() if value is not None}}
        for name, values in _VALUES.items():
            if words.get(name) not in values:
                raise SeldonClientException(f"Valid values for {name} are {', '.join(map(repr, values))}")
        if not isinstance(words.get("data"), np.ndarray | None):
            raise SeldonClientException("Valid values for data are None or numpy array")
        return words

    def _to_component(self, words: dict[str, Any], method: str, request: Any) -> tuple[Any, Any, bool, str]:
        endpoint = words["microservice_endpoint"]
        if words["transport"] == "grpc":
            return _rpc(words, endpoint, _RPCS[method], request, ())
        form = urllib.parse.urlencode({"json": json.dumps(seldon_message_to_json(request))}).encode()
        status, reason, body = _post(f"http://{endpoint}/{method}", form, {})
        success = status == http.client.OK
        try:
            return request, json_to_seldon_message(json.loads(body)), success, "" if success else reason
        except Exception as error:  # noqa: BLE001 - reported as in the original
            return request, None, success, getattr(error, "message", "") or str(error)

    def _through_gateway(
        self, words: dict[str, Any], rpc: str, path: str, request: Any, payload: Any
    ) -> tuple[Any, Any, bool, str]:
        direct = words["gateway"] == "seldon"
        if words["transport"] == "grpc":
            place = () if direct else (("seldon", words["deployment_name"] or ""), ("namespace", words["namespace"]))
            metadata = (*(pair for pair in place if pair[1] is not None), *(words.get("headers") or {}).items())
            outcome = _rpc(words, words["gateway_endpoint"], ("Seldon", rpc), request, () if direct else metadata)
            if words["client_return_type"] == "dict" and outcome[1] is not None:
                return seldon_message_to_json(request), seldon_message_to_json(outcome[1]), *outcome[2:]
            return outcome
        headers = {"Content-Type": "application/json"}
        if not direct:
            headers |= words.get("headers") or {}
            if words["call_credentials"] is not None and words["call_credentials"].token is not None:
                headers["X-Auth-Token"] = words["call_credentials"].token
        url = _url(words, f"/api/v1.0{path}", direct)
        credentials = None if direct else words["channel_credentials"]
        status, reason, body = _post(url, json.dumps(payload).encode(), headers, credentials)
        success = status == http.client.OK
        try:
            response = json.loads(body)
            if words["client_return_type"] == "proto":
                response = json_to_seldon_message(response)
        except Exception:  # noqa: BLE001 - reported as in the original
            response = None
        return request, response, success, "" if success else f"{status}:{reason}"


def _known(said: dict[str, Any], known: set[str]) -> dict[str, Any]:
    for name in said:
        if name not in known:
            raise TypeError(f"SeldonClient got an unexpected keyword argument '{name}'")
    return said


def _random(words: dict[str, Any]) -> Any:
    return np.random.default_rng().random(words.get("shape") or (1, 1))


def _payload(value: Any) -> dict[str, Any]:
    """Return the keyword for one of several payloads, by its type."""
    if isinstance(value, bytes | bytearray):
        return {"bin_data": value}
    if isinstance(value, str):
        return {"str_data": value}
    return {"custom_data" if isinstance(value, any_pb2.Any) else "data": value}


def _message(words: dict[str, Any], meta: Any = None) -> Any:
    """Make the message of the given payload, or of random numbers if there is none."""
    if words.get("bin_data") is not None:
        return prediction_pb2.SeldonMessage(binData=words["bin_data"], meta=meta)
    if words.get("str_data") is not None:
        return prediction_pb2.SeldonMessage(strData=words["str_data"], meta=meta)
    if words.get("json_data") is not None:
        return json_to_seldon_message({"jsonData": words["json_data"]})
    if words.get("custom_data") is not None and words["transport"] == "grpc":
        return prediction_pb2.SeldonMessage(customData=words["custom_data"], meta=meta)
    array = _random(words) if words.get("data") is None else words["data"]
    datadef = array_to_grpc_datadef(words["payload_type"], array, names=words.get("names"))
    return prediction_pb2.SeldonMessage(data=datadef, meta=meta)


def _predict_request(words: dict[str, Any]) -> tuple[Any, Any]:
    """Return the message of a prediction, and its JSON form, which is sent as it was given."""
    raw = words.get("raw_data")
    if isinstance(raw, prediction_pb2.SeldonMessage):
        return raw, seldon_message_to_json(raw)
    if raw:
        return json_to_seldon_message(raw), raw
    meta = prediction_pb2.Meta()
    json_format.ParseDict({"tags": words.get("meta") or {}}, meta)
    request = _message(words, meta)
    return request, seldon_message_to_json(request)


def _url(words: dict[str, Any], path: str, direct: bool) -> str:
    endpoint, prefix = words["gateway_endpoint"], words.get("gateway_prefix")
    if direct:
        return f"http://{endpoint}{path}"
    scheme = "http" if words["call_credentials"] is None or words["ssl"] is False else "https"
    named = [each for each in ("seldon", words["namespace"], words["deployment_name"]) if each is not None]
    if words.get("http_path") is not None:
        return f"{scheme}://{endpoint}/{'/'.join(named)}{words['http_path']}"
    return f"{scheme}://{endpoint}{'/' + '/'.join(named) if prefix is None else prefix}{path}"


def _post(url: str, body: bytes, headers: dict[str, str], credentials: Any = None) -> tuple[int, str, bytes]:
    context = None
    if credentials is not None and url.startswith("https:"):
        context = tls.create_default_context(cafile=credentials.certificate_chain_file)
        if not credentials.verify and credentials.certificate_chain_file is None:
            context.check_hostname, context.verify_mode = False, tls.CERT_NONE
        if credentials.private_key_file is not None:
            context.load_cert_chain(credentials.root_certificates_file, credentials.private_key_file)
    request = urllib.request.Request(url, body, headers)  # noqa: S310 - http or https, as constructed
    try:
        with urllib.request.urlopen(request, context=context) as answer:  # noqa: S310
            return answer.status, answer.reason, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.reason, error.read()


def _rpc(
    words: dict[str, Any], endpoint: str, rpc: tuple[str, str], request: Any, metadata: Any
) -> tuple[Any, Any, bool, str]:
    from .channels import open_channel
    from .proto import prediction_pb2_grpc

    service, method = rpc
    with open_channel(words, endpoint, secure=service == "Seldon" and words["gateway"] != "seldon") as channel:
        try:
            call = getattr(getattr(prediction_pb2_grpc, f"{service}Stub")(channel), method)
            return request, call(request, metadata=metadata), True, ""
        except Exception as error:  # noqa: BLE001 - reported as in the original
            return request, None, False, str(error)
