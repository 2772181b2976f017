"""Requested outputs of models with hooks: outputs of the model, and outputs that the hooks add."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import helper
from tritonclient.utils import InferenceServerException

from penstock.backends.signature import ZIPMAP
from penstock.server.v2 import inference
from penstock.server.v2.encode import encode_hook_outputs
from penstock.server.v2.rpc.outputs import OutputEncoder
from tests.backends.onnx_models import FLOAT, INT64, Node, node, save, value
from tests.clients import models
from tests.clients.tensors import document, texts
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

ROWS = np.ones((1, 2), np.float32)
ADDING = """
def post_inference(prediction, signature, metadata):
    return {"y": prediction[0], "note": "naïve"}
"""
# the outputs are [`label`, `maps`], or `maps` alone; `maps` is a list of dicts
MAPPED = """
import numpy as np

def post_inference(prediction, signature, metadata):
    rows = np.array([[row[3], row[4]] for row in prediction[-1]], np.float32)
    if len(prediction) == 1:
        return {"rows": rows, "top": "three"}
    return {"label": prediction[0], "maps": rows, "top": "three"}
"""
WORDS = """
def post_inference(prediction, signature, metadata):
    yield {"token": "a"}
    yield {"token": "b"}
    yield {"token": "", "finish": "stop"}
    yield {"finish": "end"}
"""
# more than the event loop encodes, where it is JSON or BYTES
LARGE = """
import numpy as np

NUMBERS = np.zeros(20_000, np.float32)
TEXTS = np.full(20_000, b"text", np.object_)

def post_inference(prediction, signature, metadata):
    return {"numbers": NUMBERS, "texts": TEXTS, "y": prediction[0]}
"""


def write_mapped(root: Path, name: str, *, label: bool) -> None:
    """Write a model that returns `x` [N,2] as `maps`, a list of dicts, and with `label` the index of the maximum."""
    nodes: list[Node] = [node("ZipMap", ["x"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[3, 4])]
    entry = helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, []))
    outputs = [helper.make_value_info("maps", helper.make_sequence_type_proto(entry))]
    if label:
        nodes.append(node("ArgMax", ["x"], ["label"], axis=1, keepdims=0))
        outputs.insert(0, value("label", INT64, ["N"]))
    (root / name / "1").mkdir(parents=True)
    save(root / name / "1" / "model.onnx", nodes, [value("x", FLOAT, ["N", 2])], outputs)


def write_hooks(root: Path, name: str, source: str) -> None:
    (root / name / "handler.py").write_text(source)
    (root / name / "penstock.toml").write_text('[hooks]\nfile = "handler.py"\n')


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    models.write_identity(root, "adding", "")
    write_hooks(root, "adding", ADDING)
    models.write_identity(root, "large", "")
    write_hooks(root, "large", LARGE)
    models.write_identity(root, "words", "model_transaction_policy { decoupled: true }")
    write_hooks(root, "words", WORDS)
    for name, label in (("mapped", True), ("only-maps", False)):
        write_mapped(root, name, label=label)
        write_hooks(root, name, MAPPED)
    with live_server(root) as server:
        yield server


@pytest.fixture(params=["HTTP", "gRPC"])
def over(request: pytest.FixtureRequest) -> str:
    """The transport, for tests of both."""
    transport: str = request.param
    return transport


def ask(
    live: Live, over: str, model: str, names: Sequence[str] = (), *, binary: bool = True, classes: int = 0, **more: Any
) -> dict[str, list[Any]]:
    """Request these outputs, or all if there are no names; return the received ones as plain lists."""
    how: dict[str, Any] = {"binary_data": binary} if over == "HTTP" else {}
    triton: Any = triton_http if over == "HTTP" else triton_grpc
    with triton.InferenceServerClient(live.address if over == "HTTP" else live.grpc_address) as client:
        tensor = triton.InferInput("x", ROWS.shape, "FP32")
        tensor.set_data_from_numpy(ROWS)
        outputs = [triton.InferRequestedOutput(name, class_count=classes, **how) for name in names] or None
        result = client.infer(model, [tensor], outputs=outputs, **more)
    response = result.get_response()
    requested = (
        [each["name"] for each in response["outputs"]] if over == "HTTP" else [each.name for each in response.outputs]
    )
    arrays = {name: result.as_numpy(name) for name in requested}
    return {name: texts(each) if each.dtype.hasobject else each.ravel().tolist() for name, each in arrays.items()}


def refused(live: Live, over: str, model: str, names: Sequence[str], **more: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        ask(live, over, model, names, **more)
    return str(caught.value.message())


def test_an_output_added_by_a_hook_can_be_requested(live: Live, over: str) -> None:
    everything = {"y": [1.0, 1.0], "note": ["naïve"]}
    for names in (["note"], ["note", "y"], ["y"], ["note"]):  # the layout of a repeated request is cached
        assert ask(live, over, "adding", names) == {name: everything[name] for name in names}


@pytest.mark.parametrize(("name", "hooks"), [("nte", True), ("note", False)])
def test_an_output_of_neither_the_model_nor_its_hooks_is_rejected(
    live: Live, over: str, name: str, hooks: bool
) -> None:
    text = refused(live, over, "adding", [name, "y"], parameters={} if hooks else {"hooks": False})

    assert f"unexpected inference output '{name}' for model 'adding'" in text


def test_an_output_added_by_a_hook_cannot_be_placed_in_shared_memory(live: Live) -> None:
    output = {"name": "note", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8}}
    answer = httpx.post(f"{live.url}/v2/models/adding/infer", json={**document(ROWS), "outputs": [output]})

    assert answer.status_code == 400
    assert "unexpected inference output 'note' for model 'adding'" in answer.json()["error"]


def test_an_output_that_is_not_a_tensor_can_be_requested_if_a_hook_converts_it(live: Live, over: str) -> None:
    assert ask(live, over, "mapped", ["maps"]) == {"maps": [1.0, 1.0]}
    assert ask(live, over, "mapped", ["maps", "label"]) == {"maps": [1.0, 1.0], "label": [0]}


def test_an_output_that_is_not_a_tensor_is_rejected_if_no_hook_converts_it(live: Live, over: str) -> None:
    for model, parameters in (("only-maps", {}), ("mapped", {"hooks": False})):
        text = f"output 'maps' of model '{model}' is not a tensor, only hooks receive it. It is {ZIPMAP}"
        assert refused(live, over, model, ["maps"], parameters=parameters) == text


def test_a_duplicate_hook_output_is_rejected(live: Live, over: str) -> None:
    text = "[request id: r7] Duplicate output name 'note' is not allowed in a request"
    assert refused(live, over, "adding", ["note", "y", "note"], request_id="r7") == text


def test_a_rejection_after_the_hook_has_the_request_id(live: Live, over: str) -> None:
    text = "unexpected inference output 'nte' for model 'adding'"
    assert refused(live, over, "adding", ["nte"], request_id="r7") == f"[request id: r7] {text}"
    assert refused(live, over, "adding", ["nte"]) == f"[request id: <id_unknown>] {text}"


def test_only_requested_hook_outputs_are_returned_if_the_model_has_no_tensor_outputs(live: Live, over: str) -> None:
    assert ask(live, over, "only-maps", ["top"]) == {"top": ["three"]}
    assert ask(live, over, "only-maps") == {"rows": [1.0, 1.0], "top": ["three"]}


def test_a_hook_output_requested_without_a_format_is_returned_as_json(live: Live) -> None:
    body = {**document(ROWS), "outputs": [{"name": "top"}]}
    outputs = httpx.post(f"{live.url}/v2/models/only-maps/infer", json=body).json()["outputs"]

    assert outputs == [{"name": "top", "datatype": "BYTES", "shape": [1], "data": ["three"]}]


@pytest.mark.parametrize(
    ("names", "answers"),
    [
        (["token", "finish"], [{"token": "a"}, {"token": "b"}, {"token": "", "finish": "stop"}, {"finish": "end"}]),
        (["token"], [{"token": "a"}, {"token": "b"}, {"token": ""}, {}]),
        (["finish", "nix"], [{}, {}, {"finish": "stop"}, {"finish": "end"}]),
    ],
)
def test_each_of_several_answers_has_the_requested_outputs_it_provides(
    live: Live, names: list[str], answers: list[dict[str, str]]
) -> None:
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(lambda result, error: came.put((result, error)))
        tensor = triton_grpc.InferInput("x", ROWS.shape, "FP32")
        tensor.set_data_from_numpy(ROWS)
        outputs = [triton_grpc.InferRequestedOutput(name) for name in names]
        client.async_stream_infer("words", [tensor], outputs=outputs)
        client.stop_stream()
    found = []
    while not came.empty():
        result, error = came.get()
        assert error is None
        provided = [each.name for each in result.get_response().outputs]
        found.append({name: texts(result.as_numpy(name))[0] for name in provided})

    assert found == answers


class Encoders:
    """Records the threads that encode the answers of hooks during a test."""

    def __init__(self, live: Live, watched: pytest.MonkeyPatch) -> None:
        self._loop = live.call(_thread())
        self._thread_ids: list[int] = []
        watched.setattr(inference, "encode_hook_outputs", self._recorded(encode_hook_outputs))
        watched.setattr(OutputEncoder, "encode", self._recorded(OutputEncoder.encode))

    def _recorded(self, encode: Callable[..., Any]) -> Callable[..., Any]:
        def encoded(*args: Any, **options: Any) -> Any:
            self._thread_ids.append(threading.get_ident())
            return encode(*args, **options)

        return encoded

    def on_loop(self) -> bool:
        """Whether the last answer was encoded on the event loop."""
        return self._thread_ids[-1] == self._loop


async def _thread() -> int:
    return threading.get_ident()


@pytest.mark.parametrize(
    ("over", "names", "more"),
    [
        ("HTTP", ["numbers"], {"binary": False}),
        ("HTTP", ["numbers"], {"classes": 5000}),
        ("HTTP", ["y", "numbers"], {"binary": False}),
        ("HTTP", ["texts"], {}),
        ("HTTP", ["y", "texts"], {}),
        ("HTTP", [], {}),
        ("gRPC", ["numbers"], {"classes": 5000}),
        ("gRPC", ["texts"], {}),
        ("gRPC", ["y", "texts"], {}),
        ("gRPC", [], {}),
    ],
)
def test_an_answer_that_is_slow_to_encode_does_not_block_the_event_loop(
    live: Live, monkeypatch: pytest.MonkeyPatch, over: str, names: list[str], more: dict[str, Any]
) -> None:
    encoders = Encoders(live, monkeypatch)

    assert set(ask(live, over, "large", names, **more)) == set(names or ("numbers", "texts", "y"))
    assert not encoders.on_loop()


@pytest.mark.parametrize(("names", "binary"), [(["y"], False), (["y"], True), (["numbers"], True)])
def test_an_answer_that_is_quick_to_encode_is_encoded_on_the_event_loop(
    live: Live, over: str, monkeypatch: pytest.MonkeyPatch, names: list[str], binary: bool
) -> None:
    encoders = Encoders(live, monkeypatch)

    assert list(ask(live, over, "large", names, binary=binary)) == names
    assert encoders.on_loop()


def test_a_request_rejected_after_its_hook_counts_as_failed(live: Live, over: str) -> None:
    def failed() -> int:
        with triton_http.InferenceServerClient(live.address) as client:
            (entry,) = client.get_inference_statistics("adding")["model_stats"]
        count: int = entry["inference_stats"]["fail"]["count"]
        return count

    before = failed()
    refused(live, over, "adding", ["note", "nte"])

    assert failed() == before + 1
