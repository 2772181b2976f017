"""NVIDIA's client examples about sequences, ensembles, decoupled models and model control: their calls and checks.

Source: src/python/examples of NVIDIA's client repository. Their models use other backends; the models here do the
same.
"""

from __future__ import annotations

import queue
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from onnx import TensorProto
from tritonclient.utils import InferenceServerException

from tests.backends.onnx_models import FLOAT, floats, node
from tests.clients import models
from tests.clients.models import INT32, write
from tests.clients.test_decoupled import DECOUPLED, HOOKED, PATIENCE_S, REPEAT
from tests.clients.test_perf_analyzer import PROGRAM, analyze
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

UINT32, STRING = TensorProto.UINT32, TensorProto.STRING
VALUES = [11, 7, 5, 3, 2, 0, 1]
TENSORS = """
max_batch_size: 8
model_transaction_policy { decoupled: False }
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
FLAGS = ", ".join(
    f'{{ name: "{name}" control [ {{ kind: CONTROL_SEQUENCE_{name} int32_false_true: [ 0, 1 ] }} ] }}'
    for name in ("START", "END", "READY")
)
IDLE = "max_sequence_idle_microseconds: 5000000"
OLDEST = "oldest { max_candidate_sequences: 4 preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 100 }"
CORRID = ', {{ name: "CORRID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: {} }} ] }}'
STATE = "state [ { input_name: 'SUM' output_name: 'SUM_OUT' data_type: TYPE_INT32 dims: [ 1 ] } ]"
# the second half of NVIDIA's inception ensemble: classifies the output of the first
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 128
input [ { name: "INPUT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt" } ]
ensemble_scheduling {
  step [
    { model_name: "preprocess" model_version: -1
      input_map { key: "PREPROCESS_INPUT_0" value: "INPUT" }
      output_map { key: "PREPROCESS_OUTPUT_0" value: "preprocessed_image" } },
    { model_name: "inception" model_version: -1
      input_map { key: "input" value: "preprocessed_image" }
      output_map { key: "InceptionV3/Predictions/Softmax" value: "OUTPUT" } }
  ]
}
"""


def write_sequences(root: Path) -> None:
    """Write `simple_sequence`, `simple_dyna_sequence` and `simple_string_dyna_sequence`."""
    axes: models.Axes = ["N", 1]
    flags: models.Tensors = dict.fromkeys(("INPUT", "START", "END", "READY"), (INT32, axes))
    out: models.Tensors = {"OUTPUT": (INT32, axes)}
    batching = f"sequence_batching {{ {IDLE} %s control_input [ {FLAGS} %s ] %s }}"
    nodes = [node("Add", ["INPUT", "START"], ["told"]), node("Add", ["END", "READY"], ["unused"])]
    write(root, "simple_sequence", [*nodes, node("Identity", ["told"], ["OUTPUT"])], (flags, out),
          config=TENSORS + batching % ("", "", ""))  # fmt: skip
    # the last answer includes the correlation id
    last = [node("Cast", ["CORRID"], ["id"], to=INT32), node("Mul", ["END", "id"], ["last"])]
    write(root, "simple_dyna_sequence", [*nodes, *last, node("Add", ["told", "last"], ["OUTPUT"])],
          ({**flags, "CORRID": (TensorProto.UINT64, axes)}, out),
          config=TENSORS + batching % (OLDEST, CORRID.format("TYPE_UINT64"), ""))  # fmt: skip
    # the model with string ids returns sums, as the examples expect
    summed = [node("Add", ["INPUT", "SUM"], ["SUM_OUT"]), node("Identity", ["READY"], ["unused_too"])]
    more = [node("Add", ["SUM_OUT", "last"], ["OUTPUT"])]
    write(root, "simple_string_dyna_sequence", [*nodes[1:], *last, *summed, *more],
          ({**flags, "CORRID": (STRING, axes), "SUM": (INT32, axes)}, {**out, "SUM_OUT": (INT32, axes)}),
          config=TENSORS + batching % (OLDEST, CORRID.format("TYPE_STRING"), STATE))  # fmt: skip


def write_ensemble(root: Path) -> None:
    """Write a small `preprocess_inception_ensemble`: an image is the text of a number."""
    write(root, "preprocess", [node("Cast", ["PREPROCESS_INPUT_0"], ["PREPROCESS_OUTPUT_0"], to=FLOAT)],
          ({"PREPROCESS_INPUT_0": (STRING, ["N", 1])}, {"PREPROCESS_OUTPUT_0": (FLOAT, ["N", 1])}),
          config="max_batch_size: 256")  # fmt: skip
    output = "InceptionV3/Predictions/Softmax"
    write(root, "inception", [node("Mul", ["input", "weights"], [output])],
          ({"input": (FLOAT, ["N", 1])}, {output: (FLOAT, ["N", 3])}),
          {"weights": floats([1, 3, 2])}, config="max_batch_size: 128")  # fmt: skip
    (root / "preprocess_inception_ensemble" / "1").mkdir(parents=True)
    (root / "preprocess_inception_ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    (root / "preprocess_inception_ensemble" / "labels.txt").write_text("COFFEE MUG\nCUP\nCOFFEEPOT\n")


def write_repeat(root: Path) -> None:
    """Write `repeat_int32`."""
    inputs: models.Tensors = {"IN": (INT32, ["N"]), "DELAY": (UINT32, ["M"]), "WAIT": (UINT32, [1])}
    nodes = [node("Identity", ["IN"], ["OUT"]), node("Add", ["DELAY", "WAIT"], ["late"]),
             node("Sub", ["late", "WAIT"], ["IDX"])]  # fmt: skip
    write(root, "repeat_int32", nodes, (inputs, {"OUT": (INT32, ["N"]), "IDX": (UINT32, ["M"])}),
          config=DECOUPLED + "max_batch_size: 0\n")  # fmt: skip
    (root / "repeat_int32" / "penstock.toml").write_text(HOOKED)
    (root / "repeat_int32" / "answers.py").write_text(REPEAT)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("models")
    write_sequences(root)
    write_ensemble(root)
    write_repeat(root)
    with live_server(root) as live:
        yield live


def sequences(*, dyna: bool) -> list[tuple[str, int | str, list[int]]]:
    """Return the three sequences of the examples: model, id and values."""
    named = "simple_dyna_sequence" if dyna else "simple_sequence"
    text_named, text = ("simple_string_dyna_sequence", "1002") if dyna else ("simple_sequence", str(uuid.uuid4()))
    negative = [-value for value in VALUES]
    return [(named, 1000, [0, *VALUES]), (named, 1001, [100, *negative]), (text_named, text, [20, *negative])]


def check_answers(answers: dict[int | str, list[int]], *, dyna: bool) -> None:
    """Check the answers as the examples do."""
    first, second, third = answers
    for i, (one, two, text) in enumerate(zip(answers[first], answers[second], answers[third], strict=True)):
        expected = [1, 101, 20 if dyna else 21] if not i else [VALUES[i - 1], -VALUES[i - 1], -VALUES[i - 1]]
        if dyna and i:
            expected[2] += answers[third][i - 1]
            if VALUES[i - 1] == 1:
                expected = [expected[0] + int(first), expected[1] + int(second), expected[2] + int(third)]
        assert [one, two, text] == expected, i


def number(module: Any, value: int) -> tuple[list[Any], list[Any]]:
    """Make the tensors of one request of a sequence."""
    data = np.full([1, 1], value, np.int32)
    tensor = module.InferInput("INPUT", data.shape, "INT32")
    tensor.set_data_from_numpy(data)
    return [tensor], [module.InferRequestedOutput("OUTPUT")]


@pytest.mark.parametrize("dyna", [False, True])
@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_simple_sequence_sync_infer_client(live: Live, module: Any, dyna: bool) -> None:
    answers: dict[int | str, list[int]] = defaultdict(list)
    address = live.address if module is httpclient else live.grpc_address
    with module.InferenceServerClient(address) as client:
        for model, identity, values in sequences(dyna=dyna):
            for count, value in enumerate(values, 1):
                inputs, outputs = number(module, value)
                result = client.infer(
                    model_name=model, inputs=inputs, outputs=outputs, sequence_id=identity,
                    sequence_start=(count == 1), sequence_end=(count == len(values)),
                )  # fmt: skip
                answers[identity].append(result.as_numpy("OUTPUT")[0][0])

    check_answers(answers, dyna=dyna)


def callback(answers: queue.Queue[Any], result: Any, error: Any) -> None:
    answers.put(error or result)


@pytest.mark.parametrize("dyna", [False, True])
def test_simple_grpc_sequence_stream_infer_client(live: Live, dyna: bool) -> None:
    completed: queue.Queue[Any] = queue.Queue()
    requests = sequences(dyna=dyna)
    answers: dict[int | str, list[int]] = {identity: [] for _, identity, _ in requests}
    with grpcclient.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(callback=partial(callback, completed), stream_timeout=None)
        for model, identity, values in requests:
            for count, value in enumerate(values, 1):
                inputs, outputs = number(grpcclient, value)
                client.async_stream_infer(
                    model_name=model, inputs=inputs, outputs=outputs, request_id=f"{identity}_{count}",
                    sequence_id=identity, sequence_start=(count == 1), sequence_end=(count == len(values)),
                )  # fmt: skip
        for _ in range(3 * (len(VALUES) + 1)):
            item = completed.get(timeout=PATIENCE_S)
            assert not isinstance(item, InferenceServerException), item
            identity = item.get_response().id.split("_")[0]
            answers[int(identity) if identity in ("1000", "1001") else identity].append(item.as_numpy("OUTPUT")[0][0])

    check_answers(answers, dyna=dyna)


@pytest.mark.parametrize("module", [httpclient, grpcclient])
@pytest.mark.parametrize("images", [[b"1"], [b"1", b"2", b"0.5"]])
def test_ensemble_image_client(live: Live, module: Any, images: Sequence[bytes]) -> None:
    name = "preprocess_inception_ensemble"
    address = live.address if module is httpclient else live.grpc_address
    with module.InferenceServerClient(address) as client:
        data = np.stack([np.array([image], dtype=object) for image in images], axis=0)
        tensor = module.InferInput("INPUT", data.shape, "BYTES")
        tensor.set_data_from_numpy(data)
        outputs = [module.InferRequestedOutput("OUTPUT", class_count=2)]
        result = client.infer(name, [tensor], outputs=outputs).as_numpy("OUTPUT")

    assert len(result) == len(images)
    for classes, image in zip(result, images, strict=True):
        assert [text.decode().split(":") for text in classes] == [
            [f"{float(image) * 3:f}", "1", "CUP"], [f"{float(image) * 2:f}", "2", "COFFEEPOT"],
        ]  # fmt: skip


@pytest.mark.parametrize("repeat_count", [0, 10])
def test_simple_grpc_custom_repeat(live: Live, repeat_count: int) -> None:
    request_count, offset = 2, 100
    values = np.arange(offset, offset + repeat_count, dtype=np.int32)
    delays, wait = np.zeros([repeat_count], np.uint32), np.array([0], np.uint32)
    inputs = []
    for name, data, kind in (("IN", values, "INT32"), ("DELAY", delays, "UINT32"), ("WAIT", wait, "UINT32")):
        inputs.append(grpcclient.InferInput(name, list(data.shape), kind))
        inputs[-1].set_data_from_numpy(data)
    outputs = [grpcclient.InferRequestedOutput("OUT"), grpcclient.InferRequestedOutput("IDX")]
    completed: queue.Queue[Any] = queue.Queue()
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    with grpcclient.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(callback=partial(callback, completed))
        for i in range(request_count):
            client.async_stream_infer(
                model_name="repeat_int32", inputs=inputs, request_id=str(i), outputs=outputs,
                enable_empty_final_response=True,
            )  # fmt: skip
        ended = 0
        while ended < request_count:
            item = completed.get(timeout=PATIENCE_S)
            assert not isinstance(item, InferenceServerException), item
            response = item.get_response()
            if response.parameters["triton_final_response"].bool_param:
                ended += 1
                assert not response.outputs
            else:
                found[response.id].append((item.as_numpy("OUT")[0], item.as_numpy("IDX")[0]))

    expected = [(offset + j, j) for j in range(repeat_count)]
    assert [found[str(i)] for i in range(request_count)] == [expected] * request_count


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_simple_model_control(tmp_path: Path, module: Any) -> None:
    models.write_examples(tmp_path)
    write_sequences(tmp_path)
    write_repeat(tmp_path)
    with live_server(tmp_path, model_control_mode="explicit") as live:
        address = live.address if module is httpclient else live.grpc_address
        with module.InferenceServerClient(address) as client:
            # there are eight models in the repository directory
            index = client.get_model_repository_index()
            assert len(index if module is httpclient else index.models) == 8

            client.load_model("simple")
            assert client.is_model_ready("simple")

            with pytest.raises(InferenceServerException) as failure:
                client.load_model("simple", config='"parameters": {"config": {{"max_batch_size": "16"}}}')
            assert "failed to load" in failure.value.message()

            # the value is a string in the example
            client.load_model("simple", config='{"max_batch_size":"16"}')
            assert client.is_model_ready("simple")
            config = client.get_model_config("simple")
            assert (config["max_batch_size"] if module is httpclient else config.config.max_batch_size) == 16

            client.unload_model("simple")
            assert not client.is_model_ready("simple")

            # a name that no file system accepts
            with pytest.raises(InferenceServerException) as failure:
                client.load_model("simple", config="{}", files={"file:" + "A" * 256: b"a"})
            assert failure.value.status() in {"400", "StatusCode.INVALID_ARGUMENT"}
            assert "failed to load 'simple'" in failure.value.message()
            assert client.is_server_live()

            with pytest.raises(InferenceServerException) as failure:
                client.load_model("wrong_model_name")
            assert "failed to load" in failure.value.message()


@pytest.mark.skipif(not PROGRAM.exists(), reason="perf_analyzer is not here: .ci/peers fetches it")
@pytest.mark.parametrize(
    "words",
    [
        "-m simple_sequence",
        "-i grpc -m simple_sequence --streaming --async --sequence-length 5",
        "-m simple_dyna_sequence --concurrency-range 3 --sequence-length 3",
        "-m simple_sequence --sequence-length 4 --num-of-sequences 3 --request-rate-range 60",
        "-m simple_sequence --serial-sequences --request-rate-range 50 --sequence-length 3",
        "-i grpc -m simple_dyna_sequence --streaming --async --sequence-length 4 --sequence-id-range 500:600",
        "-m preprocess_inception_ensemble --string-data 7",
    ],
)
def test_perf_analyzer_measures_sequences_and_ensembles(live: Live, words: str) -> None:
    report = analyze(live, words)

    # read from the ensemble's configuration
    assert ("Composing models" in report) == ("ensemble" in words)
