"""The tests of the TensorFlow Backend. test_tensorflow.py runs them in a separate process.

Manually: PENSTOCK_TEST_SAVEDMODELS=FOLDER pytest -o filterwarnings=default tests/backends/in_tensorflow.py, where
FOLDER is the output of tests/savedmodels.py.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import shutil
import subprocess
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.backend import FREE_ROWS, Array
from penstock.backends.cpus import usable_cpus
from penstock.backends.datatypes import DATATYPES
from penstock.backends.errors import Code, InferError, RunStopped
from penstock.backends.loading import ISOLATED
from penstock.backends.tensorflow import MAX_CALLABLES, TensorflowBackend, load, session_config
from penstock.backends.tensorflow_binding import MAX_PLANS, TensorflowBinding
from penstock.batching.loading.freeing import sharing_obstacle
from tests.backends.contract import ENDLESS, PATIENCE_S, BackendContract, batched, infer
from tests.backends.cudart_stub import needs_compiler

SAMPLE = {"sepal_length": 5.2, "sepal_width": 3.6, "petal_length": 1.4, "petal_width": 0.3}


class TestTensorflowBackend(BackendContract):
    @pytest.fixture(autouse=True)
    def _folder(self, savedmodels: Path) -> None:
        self.folder = savedmodels

    def make(self, name: str) -> TensorflowBackend:
        return load(self.folder / f"contract_{name}", "cpu", {})


@pytest.fixture
def iris(savedmodels: Path) -> TensorflowBackend:
    return load(savedmodels / "iris", "cpu", {})


def refusal(path: Path, device: str = "cpu", **options: str) -> InferError:
    with pytest.raises(InferError) as caught:
        load(path, device, options)
    return caught.value


def bind(backend: TensorflowBackend, rows: int = 8) -> TensorflowBinding:
    binding = backend.bind(batched(backend.graph), rows)
    assert isinstance(binding, TensorflowBinding)
    return binding


def failure(binding: TensorflowBinding, *inputs: Array) -> InferError:
    with pytest.raises(InferError) as caught:
        infer(binding, inputs)
    return caught.value


def sample(name: str, shape: tuple[int, ...]) -> Array:
    """Make values that use all bits of the type."""
    row = DATATYPES[name]
    count = math.prod(shape)
    if name == "BYTES":
        return np.array([b"\xff\x00" + f"ü{i}".encode() for i in range(count)], dtype=object).reshape(shape)
    bits = np.random.default_rng(7).integers(0, 256, count * row.size_bytes, np.uint8)
    if name == "BOOL":
        return (bits & 1).astype(np.bool_).reshape(shape)
    array: Array = bits.view(row.dtype).reshape(shape)
    return np.nan_to_num(array) if row.dtype.kind == "f" else array


class TestIris:
    """The model of case C25 of the specification of Cortex."""

    def check(self, found: dict[str, Array]) -> None:
        assert found["class_ids"].tolist() == [0]
        assert found["classes"].tolist() == [b"0"]
        assert found["isbig"].tolist() == [True]
        np.testing.assert_allclose(found["logits"], [[2.5000002, 2.0700002, -1.0000005]], atol=1e-6)
        np.testing.assert_allclose(found["probabilities"], [[0.59498787, 0.387045, 0.017967064]], atol=1e-6)

    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_iris_returns_the_numbers_of_the_case_for_scalars_and_rows(
        self, iris: TensorflowBackend, shape: tuple[int, ...]
    ) -> None:
        binding = bind(iris)
        inputs = [np.full(shape, SAMPLE[spec.name]) for spec in iris.graph.inputs]

        found = binding.run_on(inputs, range(len(iris.graph.outputs)))

        self.check({spec.name: array for spec, array in zip(iris.graph.outputs, found, strict=True)})

    def test_iris_reports_its_inputs_in_the_order_of_the_graph(self, iris: TensorflowBackend) -> None:
        assert [spec.name for spec in iris.graph.inputs] == list(SAMPLE)
        assert {(spec.datatype, spec.shape) for spec in iris.graph.inputs} == {("FP64", (-1,))}
        assert {spec.name: (spec.datatype, spec.shape) for spec in iris.graph.outputs} == {
            "class_ids": ("INT64", (-1,)),
            "classes": ("BYTES", (-1,)),
            "isbig": ("BOOL", (-1,)),
            "logits": ("FP32", (-1, 3)),
            "probabilities": ("FP32", (-1, 3)),
        }

    def test_iris_describes_its_signature_as_protobuf_json(self, iris: TensorflowBackend) -> None:
        described = iris.runtime_metadata["signature_def"]

        assert iris.runtime_metadata["signature_key"] == "predict"
        assert described["predict"]["methodName"] == "tensorflow/serving/predict"
        assert described["predict"]["inputs"]["sepal_width"] == {
            "name": "sepal_width:0",
            "dtype": "DT_DOUBLE",
            "tensorShape": {"dim": [{"size": "-1"}]},
        }
        assert json.loads(json.dumps(described)) == described

    def test_iris_has_nodes_for_hooks(self, iris: TensorflowBackend) -> None:
        node = iris.node_inputs[0]

        assert (node.name, node.type, node.shape) == ("sepal_length", "DT_DOUBLE", [None])
        assert len(iris.node_outputs) == 5


class TestSignatures:
    @pytest.mark.parametrize(
        ("name", "options", "key"),
        [
            ("iris", {}, "predict"),
            ("iris_keys", {}, "serving_default"),
            ("iris_keys", {"TF_SIGNATURE_DEF": "classification"}, "classification"),
            ("iris_keys", {"cortex_signature": "1"}, "predict"),
            ("iris_keys", {"cortex_signature": "1", "TF_SIGNATURE_DEF": "classification"}, "classification"),
            ("left_right", {}, "left"),
            ("special_keys", {}, "zebra"),
            ("special_keys", {"cortex_signature": "1"}, "zebra"),
            ("module", {"cortex_signature": "1"}, "serving_default"),
        ],
    )
    def test_the_default_or_configured_signature_is_selected(
        self, savedmodels: Path, name: str, options: dict[str, str], key: str
    ) -> None:
        assert load(savedmodels / name, "cpu", options).runtime_metadata["signature_key"] == key

    def test_an_unknown_signature_is_rejected_with_the_existing_ones(self, savedmodels: Path) -> None:
        error = refusal(savedmodels / "iris_keys", TF_SIGNATURE_DEF="predicts")

        assert error.code is Code.INVALID
        assert error.message == (
            "the model has no signature 'predicts': it has 'classification', 'predict', 'serving_default'"
        )

    def test_several_signatures_without_predict_are_rejected_for_cortex(self, savedmodels: Path) -> None:
        error = refusal(savedmodels / "left_right", cortex_signature="1")

        assert error.message == "the model has several signatures, so one must be selected: it has 'left', 'right'"

    def test_the_selected_signature_is_run(self, savedmodels: Path) -> None:
        x = np.zeros((1, 2), np.float32)

        for key, y in (("left", 1), ("right", 2)):
            binding = bind(load(savedmodels / "left_right", "cpu", {"TF_SIGNATURE_DEF": key}))
            assert infer(binding, [x])[0].tolist() == [[y, y]]

    def test_a_graph_may_have_another_tag(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "tags", "cpu", {"TF_GRAPH_TAG": "canary"})

        assert infer(bind(backend), [np.zeros(1, np.float32)])[0].tolist() == [1]

    def test_an_unknown_tag_is_rejected(self, savedmodels: Path) -> None:
        error = refusal(savedmodels / "tags")

        assert error.code is Code.INVALID
        assert "'serve'" in error.message
        assert "canary" in error.message


class TestSecondGeneration:
    def test_a_keras_model_runs(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "keras", "cpu", {})
        found = infer(bind(backend), [np.array([list(SAMPLE.values())] * 2, np.float32)])[0]

        assert backend.graph.outputs[0].shape == (-1, 3)
        np.testing.assert_allclose(found, [[0.59498787, 0.387045, 0.017967064]] * 2, atol=1e-6)

    def test_a_keras_model_that_tensorflow_has_saved_runs(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "keras_saved", "cpu", {})

        for _ in range(2):
            found = infer(bind(backend), [np.array([list(SAMPLE.values())] * 2, np.float32)])[0]
            np.testing.assert_allclose(found, [[0.59498787, 0.387045, 0.017967064]] * 2, atol=1e-6)
            backend.open_session().close()  # as after a stopped run: the next session must work, too

    def test_a_module_runs_with_its_variables(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "module", "cpu", {})
        names = [spec.name for spec in backend.graph.inputs]
        tensors = {"x": np.array([[1, 2], [3, 4]], np.float32), "offset": np.array([100, 200], np.float32)}

        found = infer(bind(backend), [tensors[name] for name in names], (0, 1))

        by_name = {spec.name: array.tolist() for spec, array in zip(backend.graph.outputs, found, strict=True)}
        assert by_name == {"scaled": [[1, 20], [3, 40]], "moved": [121, 243]}

    def test_a_table_is_filled_from_its_asset(self, savedmodels: Path) -> None:
        words = np.array([b"blue", b"red", b"mauve"], object)

        assert infer(bind(load(savedmodels / "lookup", "cpu", {})), [words])[0].tolist() == [2, 0, -1]


class TestTensors:
    @pytest.mark.parametrize("rows", [1, 2, 0])
    def test_tensors_of_every_type_are_returned_unchanged(self, savedmodels: Path, rows: int) -> None:
        backend = load(savedmodels / "types", "cpu", {})
        binding = bind(backend)
        arrays = [sample(spec.name, (rows, 3)) for spec in backend.graph.inputs]

        found = infer(binding, arrays, tuple(range(len(arrays))))

        assert {spec.name for spec in backend.graph.inputs} == set(DATATYPES)
        for spec, output, array in zip(backend.graph.outputs, found, arrays, strict=True):
            position = [each.name for each in backend.graph.inputs].index(spec.name.removesuffix("_out"))
            np.testing.assert_array_equal(arrays[position], output)
            assert arrays[position].dtype == output.dtype
            assert array.shape == output.shape

    def test_outputs_without_axes_are_presented_as_one_element(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "scalar_output", "cpu", {})
        shown = replace(backend.graph, outputs=tuple(replace(spec, shape=(1,)) for spec in backend.graph.outputs))
        found = infer(backend.bind(shown, 1), [np.ones((3, 2), np.float32)], (0, 1))

        assert [spec.shape for spec in backend.graph.outputs] == [(), ()]
        assert [array.tolist() for array in found] == [[6.0], [b"6.000000"]]

    def test_a_model_may_have_inputs_of_different_types(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "mixed", "cpu", {})
        tensors = {
            "number": np.array([[1, 2], [3, 4]], np.float32),
            "id": np.array([7, 8]),
            "name": np.array([b"a", "ü".encode()], object),
        }

        found = infer(bind(backend), [tensors[spec.name] for spec in backend.graph.inputs], (0, 1))

        by_name = {spec.name: array.tolist() for spec, array in zip(backend.graph.outputs, found, strict=True)}
        assert by_name == {"text": [b"a:7", "ü:8".encode()], "sum": [3.0, 7.0]}

    def test_outputs_are_in_the_order_of_the_graph(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "order", "cpu", {})

        assert [spec.name for spec in backend.graph.outputs] == ["z_first", "a_second"]
        found = infer(bind(backend), [np.zeros(1, np.float32)], (1, 0))
        assert [array.tolist() for array in found] == [[2.0], [1.0]]

    def test_a_tensor_may_have_two_names_and_an_input_may_be_an_output(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "aliases", "cpu", {})
        found = infer(bind(backend), [np.zeros(1, np.float32)], (0, 1, 2))

        by_name = {spec.name: array.tolist() for spec, array in zip(backend.graph.outputs, found, strict=True)}
        assert by_name == {"same": [1.0], "again": [1.0], "given": [0.0]}

    @pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
    def test_tensors_of_any_rank_are_accepted_by_an_unranked_model(
        self, savedmodels: Path, shape: tuple[int, ...]
    ) -> None:
        backend = load(savedmodels / "unranked", "cpu", {})
        binding = backend.bind(backend.graph, 1)

        assert infer(binding, [np.ones(shape, np.float32)])[0].tolist() == np.full(shape, 2.0).tolist()

    def test_an_unsupported_input_is_rejected_by_name(self, savedmodels: Path) -> None:
        error = refusal(savedmodels / "complex_input")
        assert error.code is Code.UNSUPPORTED
        assert error.message == "input 'x' is DT_COMPLEX64, which Penstock does not support"

        assert refusal(savedmodels / "sparse_input").message == (
            "input 'x' is a sparse tensor, which Penstock does not support"
        )

    @pytest.mark.parametrize(("name", "left_out"), [("complex_output", "odd"), ("sparse_output", "thin")])
    def test_an_unsupported_output_is_left_out_and_logged(
        self, savedmodels: Path, caplog: pytest.LogCaptureFixture, name: str, left_out: str
    ) -> None:
        with caplog.at_level(logging.WARNING, "penstock"):
            backend = load(savedmodels / name, "cpu", {})

        assert [spec.name for spec in backend.graph.outputs] == ["y"]
        assert f"output '{left_out}'" in caplog.text
        assert left_out in backend.runtime_metadata["signature_def"]["serving_default"]["outputs"]

    def test_image_models_with_free_and_fixed_rows_give_the_same_answers(self, savedmodels: Path) -> None:
        images = np.random.default_rng(1).random((3, 28, 28, 1), np.float32)
        free = infer(bind(load(savedmodels / "image", "cpu", {})), [images])[0]
        backend = load(savedmodels / "image_fixed", "cpu", {})
        binding = backend.bind(backend.graph, 1)

        fixed = np.concatenate([infer(binding, [images[row : row + 1]])[0].copy() for row in range(3)])

        assert backend.graph.inputs[0].shape == (1, 28, 28, 1)
        np.testing.assert_allclose(free, fixed, atol=1e-5)


class TestFreedRows:
    """Option penstock.free_rows."""

    @pytest.mark.parametrize("name", ["image_fixed", "module_fixed"])
    def test_freed_rows_share_a_run_and_change_no_answer(self, savedmodels: Path, name: str) -> None:
        alone, together = load(savedmodels / name, "cpu", {}), load(savedmodels / name, "cpu", {FREE_ROWS: "1"})

        assert {spec.shape[0] for spec in (*together.graph.inputs, *together.graph.outputs)} == {-1}
        assert sharing_obstacle(alone, together) == ""

    def test_hooks_get_the_original_shapes_of_a_model_with_freed_rows(self, savedmodels: Path) -> None:
        alone, together = (load(savedmodels / "image_fixed", "cpu", options) for options in ({}, {FREE_ROWS: "1"}))

        assert together.runtime_metadata == alone.runtime_metadata
        assert [node.shape for node in together.node_inputs] == [[1, 28, 28, 1]]

    def test_rows_stay_free_after_a_stopped_run(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "image_fixed", "cpu", {FREE_ROWS: "1"})
        backend.open_session().close()

        assert infer(bind(backend), [np.ones((3, 28, 28, 1), np.float32)])[0].shape == (3, 10)

    @pytest.mark.parametrize("name", ["flattens_one", "sums_rows"])
    def test_a_graph_that_uses_the_fixed_axis_inside_is_detected(self, savedmodels: Path, name: str) -> None:
        alone, together = load(savedmodels / name, "cpu", {}), load(savedmodels / name, "cpu", {FREE_ROWS: "1"})

        assert sharing_obstacle(alone, together)

    def test_a_model_without_an_axis_to_free_is_rejected(self, savedmodels: Path) -> None:
        assert refusal(savedmodels / "mlp", **{FREE_ROWS: "1"}).message == "no tensor has a first axis fixed at 1"
        assert refusal(savedmodels / "scalar_output", **{FREE_ROWS: "1"}).code is Code.INVALID


class TestOwnership:
    @pytest.mark.parametrize("name", ["contract_strings", "types", "aliases"])
    def test_an_output_shares_no_memory_with_an_acquired_buffer(self, savedmodels: Path, name: str) -> None:
        backend = load(savedmodels / name, "cpu", {})
        binding = bind(backend)
        shapes = [(4, *(3 if dim < 0 else dim for dim in spec.shape[1:])) for spec in backend.graph.inputs]
        arrays = [sample(spec.datatype, shape) for spec, shape in zip(backend.graph.inputs, shapes, strict=True)]

        found = infer(binding, arrays, tuple(range(len(backend.graph.outputs))))

        for buffer in binding.acquire_buffers(4, shapes):
            assert buffer is not None
            assert not any(np.shares_memory(buffer, output) for output in found if output.dtype != object)

    def test_run_on_copies_neither_its_inputs_nor_its_outputs(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "types", "cpu", {})
        binding = bind(backend)
        lent = binding.acquire_buffers(4, [(4, 3)] * len(backend.graph.inputs))
        fp32 = [spec.name for spec in backend.graph.inputs].index("FP32")
        for spec, buffer in zip(backend.graph.inputs, lent, strict=True):
            assert buffer is not None
            buffer[...] = sample(spec.datatype, (4, 3))

        (output,) = binding.run_on(lent, [fp32])

        assert np.shares_memory(output, lent[fp32])

    def test_writing_into_an_output_changes_no_variable(self, savedmodels: Path) -> None:
        binding = bind(load(savedmodels / "mlp", "cpu", {}))
        x = np.ones((2, 64), np.float32)
        first = infer(binding, [x])[0]
        copy = first.copy()
        first[...] = -1

        np.testing.assert_array_equal(copy, infer(binding, [x])[0])

    def test_the_number_of_cached_buffers_is_limited(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "contract_free", "cpu", {})
        binding = bind(backend, 4)

        for width in range(MAX_PLANS + 10):
            binding.acquire_buffers(1, [(1, width)])
        assert len(binding._plans) <= MAX_PLANS

    def test_the_number_of_cached_output_selections_is_limited(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "types", "cpu", {})
        binding = bind(backend)
        arrays = [sample(spec.datatype, (1, 3)) for spec in backend.graph.inputs]
        for first in range(6):
            for second in range(7):
                infer(binding, arrays, (first, second))

        assert len(backend.open_session()._callables) <= MAX_CALLABLES

    def test_a_closed_model_is_freed(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "mlp", "cpu", {})
        binding = bind(backend)
        infer(binding, [np.ones((1, 64), np.float32)])
        session = weakref.ref(backend.open_session()._session)

        backend.close()
        gc.collect()

        assert session() is None
        with pytest.raises(InferError, match="unloaded"):
            binding.run_on([np.ones((1, 64), np.float32)], [0])


class TestFailures:
    def test_a_failed_assertion_of_the_model_is_an_invalid_request_with_its_message(self, savedmodels: Path) -> None:
        binding = bind(load(savedmodels / "asserts", "cpu", {}))

        error = failure(binding, np.array([[1, -2]], np.float32))

        assert type(error) is InferError
        assert error.code is Code.INVALID
        assert error.message == "assertion failed: [x is negative] [[1 -2]]"
        assert infer(binding, [np.array([[4, 9]], np.float32)])[0].tolist() == [[2, 3]]

    def test_a_wrong_shape_has_the_message_of_tensorflow(self, savedmodels: Path) -> None:
        binding = bind(load(savedmodels / "mlp", "cpu", {}))

        error = failure(binding, np.ones((1, 63), np.float32))

        assert (error.code, error.message) == (Code.INVALID, "Matrix size-incompatible: In[0]: [1,63], In[1]: [64,256]")

    def test_a_wrong_shape_in_a_function_has_the_message_of_tensorflow(self, savedmodels: Path) -> None:
        binding = bind(load(savedmodels / "module", "cpu", {}))
        tensors = {"x": np.ones((1, 3), np.float32), "offset": np.ones(1, np.float32)}

        error = failure(binding, *(tensors[spec.name] for spec in binding._inputs))

        assert error.code is Code.INVALID
        assert error.message in {"Incompatible shapes: [1,3] vs. [2]", "Incompatible shapes: [2] vs. [1,3]"}

    def test_stopping_a_run_does_not_stop_runs_of_other_bindings(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "contract_turns", "cpu", {})
        stopped, other = bind(backend, 1), bind(backend, 1)
        x = np.ones(1, np.float32)

        with ThreadPoolExecutor(2) as pool:
            going = pool.submit(stopped.run_on, [x, np.array([ENDLESS])], [0])
            beside = pool.submit(lambda: [other.run_on([x, np.array([3000])], [0])[0].tolist() for _ in range(20)])
            while stopped._running is None and not going.done():
                threading.Event().wait(0.001)
            stopped.stop()
            with pytest.raises(RunStopped):
                going.result(PATIENCE_S)
            assert beside.result(PATIENCE_S) == [[1.0]] * 20

    def test_variables_are_reset_after_a_stopped_run(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "counter", "cpu", {})
        binding = bind(backend)
        x = np.zeros(1, np.int64)

        assert [infer(binding, [x])[0].tolist() for _ in range(2)] == [[1], [2]]
        backend.open_session().close()
        assert infer(binding, [x])[0].tolist() == [1]

    def test_a_model_whose_files_were_deleted_cannot_be_reopened(self, savedmodels: Path, tmp_path: Path) -> None:
        path = shutil.copytree(savedmodels / "order", tmp_path / "order")
        backend = load(path, "cpu", {})
        binding = bind(backend)
        shutil.rmtree(path)
        backend.open_session().close()

        assert str(tmp_path) not in failure(binding, np.zeros(1, np.float32)).message

    def test_a_folder_without_a_graph_is_not_found(self, savedmodels: Path) -> None:
        for name in ("empty_folder", "nowhere"):
            error = refusal(savedmodels / name)
            assert error.code is Code.NOT_FOUND
            assert error.message == f"'{name}' is not a SavedModel: it has no saved_model.pb"

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("no_variables", "not a valid checkpoint: variables/variables"),
            ("corrupt", "saved_model.pb': Error parsing"),
        ],
    )
    def test_a_broken_savedmodel_is_reported_without_its_path(self, savedmodels: Path, name: str, words: str) -> None:
        error = refusal(savedmodels / name)

        assert error.code is Code.INVALID
        assert words in error.message
        assert str(savedmodels) not in error.message
        assert "\n" not in error.message


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "intra", "inter"),
        [
            ({}, usable_cpus(), usable_cpus()),
            ({"TF_NUM_INTRA_THREADS": "3", "TF_NUM_INTER_THREADS": "4"}, 3, 4),
            ({"intra_op_thread_count": "5", "inter_op_thread_count": "6"}, 5, 6),
            ({"TF_NUM_INTRA_THREADS": "0", "intra_op_thread_count": "5"}, 5, usable_cpus()),
            ({"TF_NUM_INTER_THREADS": "0"}, usable_cpus(), usable_cpus()),
        ],
    )
    def test_thread_counts_are_set_in_the_session(self, options: dict[str, str], intra: int, inter: int) -> None:
        config = session_config("cpu", options)

        assert (config.intra_op_parallelism_threads, config.inter_op_parallelism_threads) == (intra, inter)

    @pytest.mark.parametrize(
        ("options", "growth", "fraction"),
        [
            ({}, True, 0.0),
            ({"allow_growth": "0"}, False, 0.0),
            ({"gpu_memory_fraction": "0.5"}, False, 0.5),
            ({"gpu_memory_fraction": "0.5", "allow_growth": "true"}, True, 0.5),
        ],
    )
    def test_gpu_memory_options_are_set_in_the_session(
        self, options: dict[str, str], growth: bool, fraction: float
    ) -> None:
        memory = session_config("cpu", options).gpu_options

        assert (memory.allow_growth, memory.per_process_gpu_memory_fraction) == (growth, fraction)

    @pytest.mark.parametrize(
        ("options", "in_turn"),
        [({}, True), ({"TF_NUM_INTER_THREADS": "2"}, False), ({"inter_op_thread_count": "1"}, False)],
    )
    def test_operations_run_sequentially_unless_inter_op_threads_are_configured(
        self, options: dict[str, str], in_turn: bool
    ) -> None:
        assert bool(session_config("cpu", options).experimental.executor_type) == in_turn

    @pytest.mark.parametrize("options", [{}, {"TF_NUM_INTER_THREADS": "2"}])
    def test_a_model_with_reference_variables_runs_with_both_executors(
        self, savedmodels: Path, options: dict[str, str]
    ) -> None:
        backend = load(savedmodels / "references", "cpu", options)

        assert [spec.name for spec in backend.graph.outputs] == ["offset", "y"]
        found = infer(bind(backend), [np.zeros((2, 2), np.float32)], (0, 1))
        assert [array.tolist() for array in found] == [[1, 2], [[1, 2], [1, 2]]]

    def test_a_graph_that_cannot_run_sequentially_gets_the_parallel_executor(self, savedmodels: Path) -> None:
        backend = load(savedmodels / "order", "cpu", {})
        binding = bind(backend)
        session = backend.open_session()

        def refuse(*_: Any) -> Any:
            raise NotImplementedError("Single-threaded executor does not support such things.")

        session._callables[binding._feeds, ("add:0",)] = refuse

        assert infer(binding, [np.zeros(1, np.float32)])[0].tolist() == [1]
        assert not backend._config.experimental.executor_type
        assert backend.open_session() is not session

    def test_a_loop_can_be_stopped_with_both_executors(self, savedmodels: Path) -> None:
        for options in ({}, {"TF_NUM_INTER_THREADS": "2"}):
            binding = bind(load(savedmodels / "contract_turns", "cpu", options), 1)
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(binding.run_on, [np.ones(1, np.float32), np.array([ENDLESS])], [0])
                while binding._running is None and not running.done():
                    threading.Event().wait(0.001)
                binding.stop()
                with pytest.raises(RunStopped):
                    running.result(PATIENCE_S)

    def test_thread_spinning_and_allocation_retries_are_off(self) -> None:
        config = session_config("cpu", {})

        assert config.experimental.disable_thread_spinning
        assert config.gpu_options.experimental.disallow_retry_on_allocation_failure

    def test_a_session_may_have_its_own_threads(self) -> None:
        assert session_config("cpu", {"TF_USE_PER_SESSION_THREADS": "On"}).use_per_session_threads

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("TF_NUM_INTRA_THREADS", "many"),
            ("inter_op_thread_count", "-1"),
            ("allow_growth", "perhaps"),
            ("gpu_memory_fraction", "1.5"),
            ("gpu_memory_fraction", "half"),
        ],
    )
    def test_an_invalid_option_is_rejected(self, name: str, value: str) -> None:
        with pytest.raises(InferError, match=f"option '{name}' must be .*, not '{value}'") as caught:
            session_config("cpu", {name: value})
        assert caught.value.code is Code.INVALID

    def test_a_device_that_does_not_exist_is_rejected(self, savedmodels: Path) -> None:
        error = refusal(savedmodels / "mlp", "cuda:99")
        assert error.code is Code.UNSUPPORTED
        assert error.message.startswith("device 'cuda:99' is configured, but TensorFlow 2.")

        assert refusal(savedmodels / "mlp", "tpu:0").code is Code.INVALID


@pytest.mark.parametrize(("name", "expected"), [("compiled", True), ("module", False)])
def test_functions_that_xla_compiles_are_detected(savedmodels: Path, name: str, expected: bool) -> None:
    assert load(savedmodels / name, "cpu", {}).compiles_each_size is expected


@needs_compiler
def test_libraries_of_custom_operations_are_loaded_before_the_model(savedmodels: Path, tmp_path: Path) -> None:
    library = tmp_path / "with space" / "libops.so"
    library.parent.mkdir()
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input="int any;", text=True, check=True, timeout=60)
    load(savedmodels / "iris", "cpu", {"custom_op_library.1": str(library)}).close()
    assert str(library) in Path("/proc/self/maps").read_text("utf-8")

    (text := library.with_name("text.so")).write_text("not a library")
    options = {"custom_op_library.1": str(text)}
    expected = "option 'custom_op_library': 'text.so' could not be registered: text.so: file too short"
    assert refusal(savedmodels / "iris", **options).message == expected


def test_a_tensor_that_the_model_does_not_have_cannot_be_bound(iris: TensorflowBackend) -> None:
    signature = replace(iris.graph, inputs=(replace(iris.graph.inputs[0], name="petals"),))

    with pytest.raises(InferError, match="no tensor 'petals'"):
        iris.bind(signature, 1)


def test_the_tensorflow_loader_returns_a_backend(savedmodels: Path) -> None:
    backend: Any = ISOLATED["tensorflow"](savedmodels / "mlp", "cpu", {})

    assert isinstance(backend, TensorflowBackend)
    assert backend.platform == "tensorflow_savedmodel"
