"""Results and exceptions of methods, and how they are answered."""

from __future__ import annotations

from typing import Any

from .definitions import Group, get, giving, predict, rest, rpc, words

TENSOR = {"data": {"tensor": {"shape": [1, 2], "values": [1, 2]}}}
RESULTS = words(
    "int8 int16 int32 int64 uint8 uint32 uint64 float16 float32 float64 longdouble complex bools texts bytes-array "
    "objects object-numbers dates records nan scalar-array scalar-text vector cube no-rows no-columns empty transposed "
    "strided masked big-endian matrix list-of-ints list-of-lists list-of-texts list-of-bools list-mixed "
    "list-of-numbers-and-none list-ragged list-of-dicts list-of-arrays list-of-numpy-scalars list-of-float32 "
    "list-of-tuples list-of-bytes list-big-int list-uint64 list-of-nan list-empty list-of-empty list-of-complex dict "
    "dict-empty dict-unicode dict-int-keys dict-mixed-keys dict-none-key dict-bool-key dict-float-key dict-tuple-key "
    "dict-numpy-scalar dict-float64 dict-int64 dict-bool_ dict-array dict-tuple dict-set dict-bytes dict-date "
    "dict-decimal dict-uuid dict-dataclass dict-nan dict-big-int dict-of-ints dict-ordered dict-default "
    "dict-text-kind dict-surrogate text text-empty text-unicode text-kind text-surrogate bytes bytes-empty bytearray "
    "none int float bool numpy-scalar numpy-bool tuple set range object response response-of-none response-of-dict "
    "response-of-text response-tags response-tags-over response-tags-list response-tags-pairs response-tags-numpy "
    "response-tags-int-key response-metrics-empty response-metrics-tuple response-metrics-dict response-metrics-bad "
    "response-metrics"
)
AS_TENSOR = words(
    "int8 uint64 float32 bools texts objects nan scalar-array vector cube no-rows transposed complex list-of-ints "
    "list-of-texts list-of-numpy-scalars list-of-tuples list-empty dict text bytes none"
)
AS_TEXT = words(
    "int8 uint64 float32 bools texts objects scalar-array scalar-text vector cube no-columns list-of-ints "
    "list-of-texts list-of-bools list-mixed list-empty dict text bytearray float response"
)
HEALTHS = words("vector texts list-of-ints dict text bytes list-empty list-ragged float bools scalar-array")
RAISED = words(
    "value nothing two key index zero own unsaid assertion stop not-implemented attribute os memory unicode seldon "
    "seldon-403 seldon-payload seldon-dict seldon-200 seldon-kind unimplemented warning"
)


def named(give: str) -> dict[str, Any]:
    """Call an endpoint that takes names and no tags."""
    return {"data": {"names": [give], "ndarray": [[1]]}}


GROUPS = [
    Group(
        "results",
        "results.Returning",
        [
            *(
                predict(f"C6-{give}" if give == "float32" else f"C7-{give}" if give == "float" else give, giving(give))
                for give in RESULTS
            ),
            *(predict(f"as-tensor-{give}", giving(give, **TENSOR)) for give in AS_TENSOR),
            *(predict(f"as-text-{give}", {"strData": "x", "meta": {"tags": {"give": give}}}) for give in AS_TEXT),
            *(predict(f"as-nothing-{give}", giving(give, data={})) for give in ("vector", "list-of-texts", "text")),
            *(
                rest(f"input-{give}", "/transform-input", giving(give))
                for give in ("float32", "dict", "none", "response-metrics")
            ),
            *(
                rest(f"output-{give}", "/transform-output", giving(give))
                for give in ("float32", "text", "float", "response-tags")
            ),
        ],
    ),
    Group(
        "results-of-messages",
        "results.Returning",
        [
            *(rpc(give, "Model/Predict", giving(give)) for give in RESULTS if give != "set"),
            *(rpc(f"as-tensor-{give}", "Model/Predict", giving(give, **TENSOR)) for give in AS_TENSOR),
            *(
                rpc(f"as-text-{give}", "Model/Predict", {"strData": "x", "meta": {"tags": {"give": give}}})
                for give in AS_TEXT
            ),
            rpc("as-nothing-vector", "Model/Predict", giving("vector", data={})),
        ],
    ),
    Group(
        "healths",
        "results.Healthy",
        [
            get("at-first", "/health/status"),
            *(
                request
                for give in HEALTHS
                for request in (
                    predict(f"becomes-{give}", giving(give)),
                    get(f"is-{give}", "/health/status"),
                )
            ),
            get("the-longer-path", "/api/v1.0/health/status"),
            get("metrics", "/metrics", port="metrics"),
        ],
    ),
    Group(
        "raised",
        "raising.Raising",
        [
            *(predict(give, giving(give)) for give in RAISED),
            *(
                rest(f"input-{give}", "/transform-input", giving(give))
                for give in ("value", "seldon-403", "unimplemented")
            ),
            *(
                rest(f"output-{give}", "/transform-output", giving(give))
                for give in ("value", "seldon-403", "unimplemented")
            ),
            *(rest(f"route-{give}", "/route", giving(give)) for give in ("value", "seldon-403", "unimplemented")),
            *(
                rest(f"aggregate-{give}", "/aggregate", [named(give)])
                for give in ("value", "seldon-403", "unimplemented")
            ),
            *(
                rest(f"feedback-{give}", "/send-feedback", {"request": named(give)})
                for give in ("value", "seldon-403", "unimplemented")
            ),
            get("health", "/health/status"),
            get("ping", "/health/ping"),
            *(rpc(f"rpc-{give}", "Model/Predict", giving(give)) for give in RAISED),
            rpc("rpc-input-value", "Transformer/TransformInput", giving("value")),
            rpc("rpc-output-unimplemented", "OutputTransformer/TransformOutput", giving("unimplemented")),
            rpc("rpc-route-unimplemented", "Router/Route", giving("unimplemented")),
            rpc("rpc-aggregate-value", "Combiner/Aggregate", {"seldonMessages": [named("value")]}),
            rpc("rpc-aggregate-unimplemented", "Combiner/Aggregate", {"seldonMessages": [named("unimplemented")]}),
            rpc("rpc-feedback-value", "Model/SendFeedback", {"request": named("value")}),
        ],
    ),
    Group(
        "raised-elsewhere",
        "raising.RaisingElsewhere",
        [
            *(
                request
                for where in ("class_names", "tags", "metrics", "nowhere")
                for request in (
                    predict(where, giving(where)),
                    rpc(f"rpc-{where}", "Model/Predict", giving(where)),
                )
            ),
        ],
    ),
    Group(
        "blueprint",
        "blueprints.WithErrors",
        [
            *(
                predict(give, giving(give))
                for give in (
                    "refused",
                    "wrapped",
                    "zero",
                    "key",
                    "index",
                    "value",
                    "memory",
                    "abort",
                    "abort-403",
                )
            ),
            rest("input", "/transform-input", giving("refused")),
            get("health", "/health/status"),
            get("unknown-url", "/nope"),
            get("wrong-method", "/predict", method="DELETE"),
            predict("bad-request", "{"),
            rpc("rpc-refused", "Model/Predict", giving("refused")),
        ],
    ),
]
