"""Tensors whose form differs between clients and the model, over both transports, in exactly counted runs.

The ragged models are those of Triton's own qa, L0_batch_input.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from penstock.backends.backend import Array
from tests.backends.onnx_models import FLOAT, INT64, STRING, floats, ints, node
from tests.clients.models import Axes, Tensors, write
from tests.clients.tensors import texts
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

FULL = "dynamic_batching { max_queue_delay_microseconds: 20000000 }"
"""A batch waits for as many rows as it holds, so that it is known what shares a run. Nothing waits the delay out."""
BATCH_INPUT = """
max_batch_size: 4
input { name: "RAGGED_INPUT" data_type: TYPE_FP32 dims: [ %s ] allow_ragged_batch: true }
output [
  { name: "RAGGED_OUTPUT" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "BATCH_AND_SIZE_OUTPUT" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "BATCH_OUTPUT" data_type: TYPE_FP32 dims: [ -1 ] }
]
batch_input [
  { kind: BATCH_%s target_name: "BATCH_AND_SIZE_INPUT" data_type: TYPE_FP32 source_input: "RAGGED_INPUT" },
  { kind: BATCH_%s target_name: "BATCH_INPUT" data_type: TYPE_FP32 source_input: "RAGGED_INPUT" }
]
"""
BATCH_ITEM = """
max_batch_size: 4
input { name: "RAGGED_INPUT" data_type: TYPE_FP32 dims: [ -1, -1 ] allow_ragged_batch: true }
output { name: "BATCH_OUTPUT" data_type: TYPE_FP32 dims: [ 2 ] }
batch_input { kind: BATCH_ITEM_SHAPE target_name: "BATCH_INPUT" data_type: TYPE_FP32 source_input: "RAGGED_INPUT" }
"""
RAGGED_IO = """
max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "OUTPUT0" source_input: "INPUT0" }
"""
RESHAPE = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 2, -1, 3 ] reshape { shape: [ 1, 2, -1, 3, 1 ] } }
output { name: "y" data_type: TYPE_FP32 dims: [ 2, -1, 3 ] reshape { shape: [ 1, 2, -1, 3, 1 ] } }
"""
EMPTY_RESHAPE = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
"""
WHOLE_RESHAPE = """
max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [ 2, 3 ] reshape { shape: [ 6 ] } }
output { name: "y" data_type: TYPE_FP32 dims: [ 3, 2 ] reshape { shape: [ 6 ] } }
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input { name: "in" data_type: TYPE_FP32 dims: [ 2, 2, 4 ] reshape { shape: [ 16 ] } }
output { name: "out" data_type: TYPE_FP32 dims: [ 8, 2 ] reshape { shape: [ 16 ] } }
ensemble_scheduling {
  step {
    model_name: "square" model_version: -1
    input_map { key: "x" value: "in" } output_map { key: "y" value: "out" }
  }
}
"""
SQUARE = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 16 ] reshape { shape: [ 4, 4 ] } }
output { name: "y" data_type: TYPE_FP32 dims: [ 16 ] reshape { shape: [ 4, 4 ] } }
"""
SCALAR = """
max_batch_size: 0
input { name: "INPUT" data_type: TYPE_FP32 dims: [ %s ] }
output { name: "OUTPUT" data_type: TYPE_FP32 dims: [ %s ] }
"""
SHAPES = """
max_batch_size: 4
input [
  { name: "x" data_type: TYPE_FP32 dims: [ 4 ] },
  { name: "v" data_type: TYPE_INT64 dims: [ 2 ] is_shape_tensor: true }
]
output { name: "y" data_type: TYPE_FP32 dims: [ -1, -1 ] }
"""
OPTIONAL = """
max_batch_size: 0
input [
  { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] },
  { name: "offset" data_type: TYPE_FP32 dims: [ 2 ] optional: true }
]
output { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] }
"""
STRINGS = """
max_batch_size: 4
input { name: "x" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "y" data_type: TYPE_STRING dims: [ -1 ] }
"""


def write_models(root: Path) -> None:
    """Write all models."""
    identity = [node("Identity", ["x"], ["y"])]
    for name, dims, kinds in (
        ("ragged_element_count_acc_zero", "-1", ("ELEMENT_COUNT", "ACCUMULATED_ELEMENT_COUNT_WITH_ZERO")),
        ("ragged_acc_shape", "-1", ("ACCUMULATED_ELEMENT_COUNT", "MAX_ELEMENT_COUNT_AS_SHAPE")),
        ("batch_item_flatten", "-1, -1", ("ELEMENT_COUNT", "ITEM_SHAPE_FLATTEN")),
    ):
        _write_batch_input(root, name, BATCH_INPUT % (dims, *kinds) + FULL)
    write(
        root, "batch_item", [node("Identity", ["BATCH_INPUT"], ["BATCH_OUTPUT"])],
        ({"RAGGED_INPUT": (FLOAT, ["R"]), "BATCH_INPUT": (FLOAT, ["N", 2])}, {"BATCH_OUTPUT": (FLOAT, ["N", 2])}),
        config=BATCH_ITEM + FULL,
    )  # fmt: skip
    write(root, "ragged_io", [node("Identity", ["INPUT0"], ["OUTPUT0"])],
          ({"INPUT0": (FLOAT, ["R"])}, {"OUTPUT0": (FLOAT, ["R"])}), config=RAGGED_IO + FULL)  # fmt: skip
    axes: Axes = ["N", 1, 2, "T", 3, 1]
    write(root, "reshape", [node("Neg", ["x"], ["y"])], ({"x": (FLOAT, axes)}, {"y": (FLOAT, axes)}),
          config=RESHAPE + FULL)  # fmt: skip
    write(root, "empty_reshape", identity, ({"x": (FLOAT, ["N"])}, {"y": (FLOAT, ["N"])}), config=EMPTY_RESHAPE + FULL)
    write(root, "whole_reshape", identity, ({"x": (FLOAT, [6])}, {"y": (FLOAT, [6])}), config=WHOLE_RESHAPE)
    turned = [node("Transpose", ["x"], ["y"], perm=[0, 2, 1])]
    write(root, "square", turned, ({"x": (FLOAT, ["N", 4, 4])}, {"y": (FLOAT, ["N", 4, 4])}), config=SQUARE)
    (root / "squares" / "1").mkdir(parents=True)
    (root / "squares" / "config.pbtxt").write_text(ENSEMBLE)
    for name, dims in (("scalar_1dim", "1"), ("scalar_2dim", "1, 1")):
        write(root, name, [node("Identity", ["INPUT"], ["OUTPUT"])],
              ({"INPUT": (FLOAT, [])}, {"OUTPUT": (FLOAT, [])}), config=SCALAR % (dims, dims))  # fmt: skip
    reshaped: tuple[Tensors, Tensors] = (
        {"x": (FLOAT, ["N", 4]), "v": (INT64, [3])},
        {"y": (FLOAT, ["N", "A", "B"])},
    )
    write(root, "shapes", [node("Reshape", ["x", "v"], ["y"])], reshaped, config=SHAPES + FULL)
    write(root, "strings", identity, ({"x": (STRING, ["N", "W"])}, {"y": (STRING, ["N", "W"])}), config=STRINGS + FULL)
    _write_optional(root)


def _write_batch_input(root: Path, name: str, config: str) -> None:
    """Write a model in which every row of an output is the whole input of the same name."""
    names = ("RAGGED", "BATCH_AND_SIZE", "BATCH")
    ones = [node("Div", ["BATCH_AND_SIZE_INPUT"] * 2, ["ones"]), node("Reshape", ["ones", "column"], ["rows"])]
    flat = [node("Reshape", [f"{each}_INPUT", "row"], [f"{each}_row"]) for each in names]
    spread = [node("MatMul", ["rows", f"{each}_row"], [f"{each}_OUTPUT"]) for each in names]
    inputs = {f"{each}_INPUT": (FLOAT, [f"n{each}"]) for each in names}
    outputs = {f"{each}_OUTPUT": (FLOAT, ["N", f"m{each}"]) for each in names}
    constants = {"column": ints([-1, 1]), "row": ints([1, -1])}
    write(root, name, [*ones, *flat, *spread], (inputs, outputs), constants, config=config)


def _write_optional(root: Path) -> None:
    """Write y = x + offset, an initializer that a client may override."""
    write(root, "optional", [node("Add", ["x", "offset"], ["y"])],
          ({"x": (FLOAT, ["N", 2]), "offset": (FLOAT, [2])}, {"y": (FLOAT, ["N", 2])}),
          {"offset": floats([10, 10])}, config=OPTIONAL)  # fmt: skip


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root: Path = tmp_path_factory.mktemp("repository")
    write_models(root)
    with live_server(root) as server:
        yield server


class Client:
    """One transport: requests sent at once, in order, and what the server has counted."""

    def __init__(self, kind: Any, address: str) -> None:
        self.triton = kind
        self.triton_client = kind.InferenceServerClient(address, **({"concurrency": 4} if kind is triton_http else {}))

    def together(self, model: str, output: str, requests: Sequence[Mapping[str, tuple[str, Array]]]) -> list[Array]:
        """Send requests that share a batch; return the output of each."""
        inputs = [[self.input_of(name, *sent) for name, sent in request.items()] for request in requests]
        outputs = [self.triton.InferRequestedOutput(output)]
        if self.triton is triton_http:
            pending = [self.triton_client.async_infer(model, each, outputs=outputs) for each in inputs]
            return [each.get_result().as_numpy(output) for each in pending]
        answers = [queue.SimpleQueue[tuple[Any, Any]]() for _ in inputs]
        for each, answer in zip(inputs, answers, strict=True):
            self.triton_client.async_infer(
                model, each, outputs=outputs, callback=lambda result, error, to=answer: to.put((result, error))
            )
        results = [answer.get(timeout=20) for answer in answers]
        assert [error for _, error in results] == [None] * len(results)
        return [result.as_numpy(output) for result, _ in results]

    def input_of(self, name: str, datatype: str, array: Array) -> Any:
        """Make an InferInput."""
        return self.triton.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)

    def counts(self, model: str) -> tuple[int, int, dict[int, int]]:
        """Return the inferences and executions so far, and the executions of each batch size."""
        answer = self.triton_client.get_inference_statistics(model, **self.as_json())
        (entry,) = answer["model_stats"]
        sizes = {int(each["batch_size"]): int(each["compute_infer"]["count"]) for each in entry["batch_stats"]}
        return int(entry["inference_count"]), int(entry["execution_count"]), sizes

    def metadata(self, model: str) -> dict[str, list[int]]:
        """Return the shape of each tensor."""
        answer = self.triton_client.get_model_metadata(model, **self.as_json())
        return {each["name"]: [int(dim) for dim in each["shape"]] for each in (*answer["inputs"], *answer["outputs"])}

    def as_json(self) -> dict[str, bool]:
        """Return plain objects."""
        return {} if self.triton is triton_http else {"as_json": True}


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(request: pytest.FixtureRequest, live: Live) -> Iterator[Client]:
    http = request.param == "http"
    new_client = Client(triton_http, live.address) if http else Client(triton_grpc, live.grpc_address)
    yield new_client
    new_client.triton_client.close()


class Runs:
    """The changes of a model's counts since the last call."""

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model
        self._before = client.counts(model)

    def moved(self) -> tuple[int, int, dict[int, int]]:
        before, after = self._before, self._client.counts(self._model)
        self._before = after
        sizes = {size: count - before[2].get(size, 0) for size, count in after[2].items()}
        moved = {size: count for size, count in sizes.items() if count}
        return after[0] - before[0], after[1] - before[1], moved


def ragged(*shapes: tuple[int, ...], name: str = "RAGGED_INPUT") -> list[dict[str, tuple[str, Array]]]:
    """Make requests of these shapes, each full of its last dim."""
    return [{name: ("FP32", np.full(shape, shape[-1], np.float32))} for shape in shapes]


class TestRaggedBatching:
    SHAPES = ((1, 2), (1, 4), (1, 1), (1, 3))

    @pytest.mark.parametrize(
        ("model", "output", "counts"),
        [
            ("ragged_acc_shape", "RAGGED_OUTPUT", dict.fromkeys),
            ("ragged_element_count_acc_zero", "BATCH_AND_SIZE_OUTPUT", list),
            ("ragged_acc_shape", "BATCH_AND_SIZE_OUTPUT", lambda row: np.diff([0, *row])),
            ("ragged_element_count_acc_zero", "BATCH_OUTPUT", np.diff),
        ],
    )
    def test_ragged_requests_share_one_batch_and_the_model_receives_derived_inputs_for_each(
        self, client: Client, model: str, output: str, counts: Callable[[Array], Iterable[float]]
    ) -> None:
        runs = Runs(client, model)

        found = client.together(model, output, ragged(*self.SHAPES))

        # requests sent in parallel may arrive in any order
        assert [sorted(counts(row)) for (row,) in found] == [[1, 2, 3, 4]] * 4
        assert runs.moved() == (4, 1, {4: 1})

    def test_a_ragged_input_is_flat_and_a_count_may_be_given_as_a_shape(self, client: Client) -> None:
        (row, *_), *_ = client.together("ragged_acc_shape", "RAGGED_OUTPUT", ragged(*self.SHAPES))
        assert sorted(row) == [1, 2, 2, 3, 3, 3, 4, 4, 4, 4]

        found = client.together("ragged_acc_shape", "BATCH_OUTPUT", ragged(*self.SHAPES))
        assert [each.shape for each in found] == [(1, 4)] * 4

    def test_item_shapes_have_one_row_per_row_of_the_batch(self, client: Client) -> None:
        runs = Runs(client, "batch_item")

        found = client.together("batch_item", "BATCH_OUTPUT", ragged((2, 1, 2), (1, 1, 2), (1, 2, 2)))

        assert [each.tolist() for each in found] == [[[1, 2], [1, 2]], [[1, 2]], [[2, 2]]]
        assert runs.moved() == (4, 1, {4: 1})

    def test_flattened_item_shapes_cover_all_items_of_the_batch(self, client: Client) -> None:
        shapes = ((1, 4, 1), (1, 1, 2), (1, 1, 2), (1, 2, 2))
        runs = Runs(client, "batch_item_flatten")

        found = client.together("batch_item_flatten", "BATCH_OUTPUT", ragged(*shapes))

        pairs = [sorted(zip(row[0][::2], row[0][1::2], strict=True)) for row in (each.tolist() for each in found)]
        assert pairs == [[(1, 2), (1, 2), (2, 2), (4, 1)]] * 4
        assert runs.moved() == (4, 1, {4: 1})

    def test_a_flat_output_is_split_by_the_shapes_of_the_requests(self, client: Client) -> None:
        requests = ragged(*self.SHAPES, name="INPUT0")
        runs = Runs(client, "ragged_io")

        found = client.together("ragged_io", "OUTPUT0", requests)

        for output, request in zip(found, requests, strict=True):
            np.testing.assert_array_equal(output, request["INPUT0"][1])
        assert runs.moved() == (4, 1, {4: 1})

    def test_metadata_shows_the_source_input_and_omits_derived_inputs(self, client: Client) -> None:
        assert client.metadata("ragged_acc_shape") == {
            "RAGGED_INPUT": [-1, -1], "RAGGED_OUTPUT": [-1, -1], "BATCH_AND_SIZE_OUTPUT": [-1, -1],
            "BATCH_OUTPUT": [-1, -1],
        }  # fmt: skip

    def test_a_derived_input_cannot_be_sent_by_a_client(self, client: Client) -> None:
        tensor = client.input_of("BATCH_INPUT", "FP32", np.ones((1, 1), np.float32))
        with pytest.raises(InferenceServerException, match="unexpected inference input 'BATCH_INPUT'"):
            client.triton_client.infer("ragged_acc_shape", [tensor])


class TestReshape:
    def test_clients_and_the_model_use_their_own_shapes(self, client: Client) -> None:
        arrays = [np.arange(rows * 24, dtype=np.float32).reshape(rows, 2, 4, 3) for rows in (1, 3)]
        runs = Runs(client, "reshape")

        found = client.together("reshape", "y", [{"x": ("FP32", array)} for array in arrays])

        for output, array in zip(found, arrays, strict=True):
            np.testing.assert_array_equal(output, -array)
        assert runs.moved() == (4, 1, {4: 1})

    def test_an_empty_reshape_removes_an_axis(self, client: Client) -> None:
        arrays = [np.full((2, 1), number, np.float32) for number in (1, 2)]

        found = client.together("empty_reshape", "y", [{"x": ("FP32", array)} for array in arrays])

        assert [each.tolist() for each in found] == [[[1], [1]], [[2], [2]]]

    def test_a_model_without_a_batch_axis_can_be_reshaped(self, client: Client) -> None:
        array = np.arange(6, dtype=np.float32).reshape(2, 3)

        (found,) = client.together("whole_reshape", "y", [{"x": ("FP32", array)}])

        assert found.tolist() == [[0, 1], [2, 3], [4, 5]]

    def test_an_ensemble_can_be_reshaped(self, client: Client) -> None:
        array = np.arange(32, dtype=np.float32).reshape(2, 2, 2, 4)

        (found,) = client.together("squares", "out", [{"in": ("FP32", array)}])

        np.testing.assert_array_equal(found, array.reshape(2, 4, 4).swapaxes(1, 2).reshape(2, 8, 2))
        assert client.metadata("squares") == {"in": [-1, 2, 2, 4], "out": [-1, 8, 2]}

    @pytest.mark.parametrize(("model", "shape"), [("scalar_1dim", (1,)), ("scalar_2dim", (1, 1))])
    def test_a_scalar_has_as_many_dims_of_1_as_are_configured(
        self, client: Client, model: str, shape: tuple[int, ...]
    ) -> None:
        array = np.full(shape, 7, np.float32)

        (found,) = client.together(model, "OUTPUT", [{"INPUT": ("FP32", array)}])

        np.testing.assert_array_equal(found, array)

    def test_metadata_has_the_dims_and_the_configuration_has_dims_and_reshape(self, client: Client, live: Live) -> None:
        with triton_http.InferenceServerClient(live.address) as http:
            config = http.get_model_config("reshape")

        assert client.metadata("reshape") == {"x": [-1, 2, -1, 3], "y": [-1, 2, -1, 3]}
        assert [each["dims"] for each in (*config["input"], *config["output"])] == [[2, -1, 3]] * 2
        assert config["input"][0]["reshape"] == {"shape": [1, 2, -1, 3, 1]}

    def test_an_input_in_the_models_own_shape_is_rejected(self, client: Client) -> None:
        tensor = client.input_of("x", "FP32", np.zeros((1, 1, 2, 4, 3, 1), np.float32))
        with pytest.raises(InferenceServerException, match=r"unexpected shape for input 'x' .* Expected \[-1,2,-1,3\]"):
            client.triton_client.infer("reshape", [tensor])


class TestShapeTensors:
    def request(self, rows: int, *values: int) -> dict[str, tuple[str, Array]]:
        x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
        return {"x": ("FP32", x), "v": ("INT64", np.array(values, np.int64))}

    def test_requests_with_equal_shape_values_share_a_batch_and_their_first_values_are_summed(
        self, client: Client
    ) -> None:
        runs = Runs(client, "shapes")

        found = client.together("shapes", "y", [self.request(1, 1, 2, 2), self.request(3, 3, 2, 2)])

        assert [each.shape for each in found] == [(1, 2, 2), (3, 2, 2)]
        assert runs.moved() == (4, 1, {4: 1})

    def test_requests_with_different_shape_values_run_separately(self, client: Client) -> None:
        runs = Runs(client, "shapes")

        found = client.together("shapes", "y", [self.request(4, 4, 4, 1), self.request(4, 4, 1, 4)])

        assert [each.shape for each in found] == [(4, 4, 1), (4, 1, 4)]
        assert runs.moved() == (8, 2, {4: 2})

    def test_the_first_shape_value_must_equal_the_rows_of_the_request(self, client: Client) -> None:
        inputs = [client.input_of(name, *sent) for name, sent in self.request(2, 1, 2, 2).items()]
        with pytest.raises(InferenceServerException, match="shape tensor 'v' for model 'shapes' begins with 1"):
            client.triton_client.infer("shapes", inputs)


class TestOptionalInputs:
    def test_requests_with_different_optional_inputs_never_share_a_batch(self, client: Client) -> None:
        x, offset = ("FP32", np.ones((1, 2), np.float32)), ("FP32", np.full(2, 5, np.float32))
        runs = Runs(client, "optional")

        found = client.together("optional", "y", [{"x": x}, {"x": x, "offset": offset}, {"offset": offset, "x": x}])

        assert [each.tolist() for each in found] == [[[11, 11]], [[6, 6]], [[6, 6]]]
        assert runs.moved() == (3, 3, {1: 3})


class TestStrings:
    WORDS = (["", "naïve"], ["日本", "🙂\n"], ["", ""], ["x" * 300, "a"])

    def test_a_batch_of_strings_is_returned_unchanged(self, client: Client) -> None:
        arrays = [np.array([[word.encode() for word in words]], np.object_) for words in self.WORDS]
        runs = Runs(client, "strings")

        found = client.together("strings", "y", [{"x": ("BYTES", array)} for array in arrays])

        assert [texts(each) for each in found] == list(self.WORDS)
        assert [each.shape for each in found] == [(1, 2)] * 4
        assert runs.moved() == (4, 1, {4: 1})
