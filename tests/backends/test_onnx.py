from __future__ import annotations

import gc
import math
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from penstock.backends.backend import Array
from penstock.backends.cpus import usable_cpus
from penstock.backends.datatypes import DATATYPES
from penstock.backends.errors import Code, InferError
from penstock.backends.onnx import OnnxBackend, load, open_session, session_options
from penstock.batching.devices.memory import resident_bytes
from tests.backends import gil
from tests.backends.contract import BackendContract, batched, float_rows, infer
from tests.backends.onnx_models import BFLOAT16, FLOAT, INT64, STRING, contract_model, floats, ints, node, save, value


class TestOnnxBackend(BackendContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self, name: str) -> OnnxBackend:
        return load(contract_model(name, self.folder / "model.onnx"), "cpu", {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def identity(path: Path, code: int, shape: list[int | str | None]) -> OnnxBackend:
    """Load y = x through a node that ONNX Runtime does not optimize away for any type."""
    return load(
        save(path, [node("Identity", ["x"], ["y"])], [value("x", code, shape)], [value("y", code, shape)]), "cpu", {}
    )


def refusal(path: Path, device: str = "cpu", **options: str) -> InferError:
    with pytest.raises(InferError) as caught:
        load(path, device, options)
    return caught.value


def sample(name: str, shape: tuple[int, ...]) -> Array:
    """Make values that use all bits of the type."""
    row = DATATYPES[name]
    count = math.prod(shape)
    if name == "BYTES":
        return np.array([f"ü{i}".encode() for i in range(count)], dtype=object).reshape(shape)
    bits = np.random.default_rng(7).integers(0, 256, count * row.size_bytes, np.uint8)
    if name == "BOOL":
        return (bits & 1).astype(np.bool_).reshape(shape)
    array: Array = bits.view(row.dtype).reshape(shape)
    return np.nan_to_num(array) if row.dtype.kind == "f" else array


@pytest.mark.parametrize("name", DATATYPES)
@pytest.mark.parametrize("shape", [["N", 3], ["N", "M"], [2, 3], ["N", None, 3]])
def test_every_datatype_is_returned_unchanged(path: Path, name: str, shape: list[int | str | None]) -> None:
    backend = identity(path, DATATYPES[name].onnx_code, shape)
    signature = backend.graph if shape == [2, 3] else batched(backend.graph)
    binding = backend.bind(signature, 1 if shape == [2, 3] else 4)
    array = sample(name, (2, 5, 3) if len(shape) == 3 else (2, 3))

    for _ in range(2):
        (given_back,) = infer(binding, [array])
        np.testing.assert_array_equal(array, given_back)
        assert array.dtype == given_back.dtype

    assert backend.graph.inputs[0].datatype == name


@pytest.mark.parametrize("name", DATATYPES)
def test_tensors_of_every_datatype_may_be_empty(path: Path, name: str) -> None:
    backend = identity(path, DATATYPES[name].onnx_code, ["N", "M"])
    binding = backend.bind(batched(backend.graph), 4)

    for shape in [(0, 3), (3, 0), (0, 0)]:
        assert shape == infer(binding, [sample(name, shape)])[0].shape


class TestStrings:
    def test_a_string_that_is_not_utf8_is_an_invalid_request(self, path: Path) -> None:
        binding = identity(path, STRING, ["N"]).bind(identity(path, STRING, ["N"]).graph, 1)

        with pytest.raises(InferError, match=r"input 'x': a string is not UTF-8") as caught:
            infer(binding, [np.array([b"fine", b"\xff"], dtype=object)])
        assert caught.value.code is Code.INVALID

    def test_a_model_may_have_strings_and_numbers(self, path: Path) -> None:
        save(
            path,
            [node("Identity", ["s"], ["t"]), node("Shape", ["s"], ["n"])],
            [value("s", STRING, ["N", "M"])],
            [value("t", STRING, ["N", "M"]), value("n", INT64, [2])],
        )
        binding = load(path, "cpu", {}).bind(load(path, "cpu", {}).graph, 1)

        n, t = infer(binding, [np.array([[b"a", b"b", b"c"]], dtype=object)], (1, 0))

        assert n.tolist() == [1, 3]
        assert t.tolist() == [[b"a", b"b", b"c"]]


class TestOutputs:
    def test_a_later_run_does_not_overwrite_a_large_output(self, path: Path) -> None:
        backend = identity(path, FLOAT, ["N", 40_000])
        binding = backend.bind(batched(backend.graph), 2)
        first = infer(binding, [np.ones((2, 40_000), np.float32)])[0]

        infer(binding, [np.full((2, 40_000), 2, np.float32)])

        assert first.sum() == 80_000.0
        assert first.flags.writeable

    def test_an_output_that_is_an_initializer_is_a_copy(self, path: Path) -> None:
        save(
            path,
            [node("Identity", ["x"], ["y"]), node("Identity", ["w"], ["c"])],
            [value("x", FLOAT, ["N"])],
            [value("y", FLOAT, ["N"]), value("c", FLOAT, ["K"])],
            {"w": floats([1, 2])},
        )
        backend = load(path, "cpu", {})
        binding = backend.bind(backend.graph, 1)

        infer(binding, [np.ones(1, np.float32)], (1,))[0][...] = 99

        assert infer(binding, [np.ones(1, np.float32)], (1,))[0].tolist() == [1.0, 2.0]

    def test_an_output_that_is_an_input_does_not_share_its_buffer(self, path: Path) -> None:
        save(
            path,
            [node("Relu", ["x"], ["y"])],
            [value("x", FLOAT, ["N", 2])],
            [value("x", FLOAT, ["N", 2]), value("y", FLOAT, ["N", 2])],
        )
        backend = load(path, "cpu", {})
        binding = backend.bind(backend.graph, 1)

        x, y = infer(binding, [np.ones((3, 2), np.float32)], (0, 1))
        infer(binding, [np.zeros((3, 2), np.float32)], (0, 1))

        assert 6.0 == x.sum() == y.sum()

    def test_an_output_that_is_an_input_is_copied_when_the_runtime_returns_the_fed_array(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # versions up to 1.25 do so: the next batch's rows would overwrite this batch's answers
        x = value("x", FLOAT, ["N", 2])
        save(path, [node("Relu", ["x"], ["y"])], [x], [x, value("y", FLOAT, ["N", 2])])
        binding: Any = (backend := load(path, "cpu", {})).bind(batched(backend.graph), 4)
        run = binding._session.run

        def hand_on(names: list[str], feeds: dict[str, Any], options: Any) -> list[Any]:
            return [feeds.get(name, found) for name, found in zip(names, run(names, feeds, options), strict=True)]

        monkeypatch.setattr(binding._session, "run", hand_on)
        first, _ = infer(binding, [np.ones((3, 2), np.float32)], (0, 1))
        infer(binding, [np.zeros((3, 2), np.float32)], (0, 1))

        assert first.sum() == 6.0

    @pytest.mark.parametrize("rows", ["N", 2])
    def test_an_output_that_is_an_input_has_the_values_of_the_input(self, path: Path, rows: int | str) -> None:
        x = value("x", FLOAT, [rows, 2])
        save(path, [node("Relu", ["x"], ["y"])], [x], [x, value("y", FLOAT, [rows, 2])])
        backend = load(path, "cpu", {})
        binding = backend.bind(batched(backend.graph) if rows == "N" else backend.graph, 2)

        for scale in (1, 2):
            array = scale * np.array([[1, -2], [3, 4]], np.float32)

            same, positive = infer(binding, [array], (0, 1))

            assert same.tolist() == array.tolist()
            assert positive.tolist() == np.maximum(array, 0).tolist()

    def test_outputs_with_other_rows_than_the_input_are_returned_whole(self, path: Path) -> None:
        """The model declares M rows: the run with bound outputs fails once, and later runs use unbound outputs."""
        save(
            path,
            [node("Concat", ["x", "x"], ["y"], axis=0)],
            [value("x", FLOAT, ["N", 2])],
            [value("y", FLOAT, ["M", 2])],
        )
        backend = load(path, "cpu", {})
        binding = backend.bind(batched(backend.graph), 4)

        for rows in (1, 2, 1):
            assert (2 * rows, 2) == infer(binding, [np.ones((rows, 2), np.float32)])[0].shape

    def test_an_output_whose_shape_depends_on_values_is_returned_in_its_shape(self, path: Path) -> None:
        save(path, [node("NonZero", ["x"], ["y"])], [value("x", FLOAT, ["N"])], [value("y", INT64, [1, None])])
        backend = load(path, "cpu", {})
        binding = backend.bind(backend.graph, 1)

        assert infer(binding, [floats([0, 1, 0])])[0].tolist() == [[1]]
        assert infer(binding, [floats([1, 0, 1])])[0].tolist() == [[0, 2]]

    def test_an_output_of_unknown_rank_is_returned_in_its_shape(self, path: Path) -> None:
        save(
            path,
            [node("Reshape", ["x", "s"], ["y"])],
            [value("x", FLOAT, ["N"]), value("s", INT64, ["R"])],
            [value("y", FLOAT, None)],
        )
        backend = load(path, "cpu", {})
        shown = replace(backend.graph, outputs=(replace(backend.graph.outputs[0], shape=(1,)),))
        binding = backend.bind(shown, 1)

        assert infer(binding, [np.zeros(6, np.float32), ints([2, 3])])[0].shape == (2, 3)

    def test_a_sequence_of_maps_is_a_list_of_dicts(self, path: Path) -> None:
        zipped = helper.make_sequence_type_proto(
            helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, None))
        )
        save(
            path,
            [node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[3, 4])],
            [value("x", FLOAT, ["N", 2])],
            [helper.make_value_info("y", zipped)],
        )
        backend = load(path, "cpu", {})
        binding = backend.bind(batched(backend.graph), 4)

        assert backend.graph.outputs[0].datatype == "seq(map(int64,tensor(float)))"
        assert infer(binding, [floats([[1, 2], [3, 4]])])[0] == [{3: 1.0, 4: 2.0}, {3: 3.0, 4: 4.0}]
        assert infer(binding, [np.zeros((0, 2), np.float32)])[0] == []

    def test_a_bfloat16_output_of_free_shape_works_beside_other_types(self, path: Path) -> None:
        save(
            path,
            [node("Cast", ["x"], ["b"], to=BFLOAT16), node("Identity", ["x"], ["y"])],
            [value("x", FLOAT, ["N", "M"])],
            [value("y", FLOAT, ["N", "M"]), value("b", BFLOAT16, ["N", "M"])],
        )
        backend = load(path, "cpu", {})
        binding = backend.bind(batched(backend.graph), 4)

        b, y = infer(binding, [floats([[1, 2]])], (1, 0))

        assert b.tolist() == [[0x3F80, 0x4000]]
        assert y.tolist() == [[1.0, 2.0]]


class TestInputs:
    def test_an_input_of_optional_type_may_be_absent(self, path: Path) -> None:
        kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, ["N"]))
        save(
            path,
            [node("OptionalHasElement", ["x"], ["y"])],
            [helper.make_value_info("x", kind)],
            [value("y", TensorProto.BOOL, [])],
        )
        backend = load(path, "cpu", {})
        binding = backend.bind(backend.graph, 1)

        assert backend.graph.inputs[0].optional
        assert infer(binding, [None])[0].tolist() is False
        assert infer(binding, [np.ones(2, np.float32)])[0].tolist() is True

    def test_a_model_may_have_no_inputs(self, path: Path) -> None:
        save(path, [node("Identity", ["w"], ["y"])], [], [value("y", FLOAT, [2])], {"w": floats([1, 2])})
        backend = load(path, "cpu", {})
        binding = backend.bind(backend.graph, 1)
        binding.acquire_buffers(1, [])

        assert binding.run((0,))[0].tolist() == [1.0, 2.0]

    def test_inputs_may_be_bound_in_another_order_than_the_graphs(self, path: Path) -> None:
        save(
            path,
            [node("Sub", ["a", "b"], ["y"])],
            [value("a", FLOAT, ["N"]), value("b", FLOAT, ["N"])],
            [value("y", FLOAT, ["N"])],
        )
        backend = load(path, "cpu", {})
        binding = backend.bind(replace(batched(backend.graph), inputs=backend.graph.inputs[::-1]), 4)

        assert infer(binding, [floats([3]), floats([2])])[0].tolist() == [-1.0]

    def test_binding_an_input_that_the_model_does_not_have_is_rejected(self, path: Path) -> None:
        backend = identity(path, FLOAT, ["N"])
        other = replace(backend.graph, inputs=(replace(backend.graph.inputs[0], name="z"),))

        with pytest.raises(InferError, match="no tensor 'z'"):
            backend.bind(other, 1)

    def test_the_number_of_cached_io_bindings_is_limited(self, path: Path) -> None:
        backend = identity(path, FLOAT, ["N", "M"])
        binding = backend.bind(batched(backend.graph), 2)

        for width in range(1, 600):
            assert (1, width) == infer(binding, [np.zeros((1, width), np.float32)])[0].shape
        gc.collect()

        assert sum(isinstance(each, onnxruntime.IOBinding) for each in gc.get_objects()) < 600


class TestErrors:
    def test_a_value_out_of_range_is_an_invalid_request_that_names_the_value(self, path: Path) -> None:
        save(
            path,
            [node("Gather", ["table", "x"], ["y"])],
            [value("x", INT64, ["N"])],
            [value("y", FLOAT, ["N"])],
            {"table": floats([1, 2])},
        )
        backend = load(path, "cpu", {})
        binding = backend.bind(batched(backend.graph), 4)

        with pytest.raises(
            InferError, match=r"^onnx runtime error 2: .*indices element out of data bounds, idx=7"
        ) as caught:
            infer(binding, [ints([7])])
        assert caught.value.code is Code.INVALID

    def test_an_error_of_the_runtime_does_not_reveal_paths(self, path: Path) -> None:
        save(
            path,
            [node("Reshape", ["x", "s"], ["y"])],
            [value("x", FLOAT, ["N"]), value("s", INT64, ["R"])],
            [value("y", FLOAT, None)],
        )
        backend = load(path, "cpu", {})
        binding = backend.bind(backend.graph, 1)

        with pytest.raises(InferError, match="cannot be reshaped") as caught:
            infer(binding, [np.zeros(6, np.float32), ints([4])])
        assert caught.value.code is Code.INTERNAL
        assert "/" not in caught.value.message

    def test_a_file_that_is_not_a_model_is_reported_with_its_size(self, path: Path) -> None:
        path.write_bytes(b"no model")

        error = refusal(path)

        assert error.code is Code.INVALID
        assert error.message == (
            "onnx runtime error 7: Load model from model.onnx failed:Protobuf parsing failed. "
            f"{path} has 8 bytes: it is truncated or not an ONNX model"
        )

    def test_an_error_of_a_complete_model_does_not_mention_its_size(self, path: Path) -> None:
        save(path, [node("Nope", ["x"], ["y"])], [value("x", FLOAT, ["N"])], [value("y", FLOAT, ["N"])])

        assert "bytes" not in refusal(path).message

    def test_a_file_without_read_permission_is_reported_with_the_user_id(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forbidden(*_: Any) -> Any:
            raise PermissionError(13, "Permission denied")

        def make() -> Any:
            raise ValueError("Load model from model.onnx failed:system error number 13")

        monkeypatch.setattr(Path, "open", forbidden)
        with pytest.raises(InferError, match=r"error number 13: .*permission denied") as caught:
            open_session(path, make)

        assert caught.value.message.endswith(f"13: {path}: permission denied for user id {os.geteuid()}")

    def test_a_git_lfs_pointer_is_reported_with_the_command_to_fetch_the_model(self, path: Path) -> None:
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")

        assert refusal(path).message == (
            "onnx runtime error 7: Load model from model.onnx failed:Protobuf parsing failed. The file is a Git LFS "
            "pointer: fetch the model with `git lfs pull`"
        )

    def test_a_missing_file_is_not_found(self, path: Path) -> None:
        error = refusal(path)

        assert error.code is Code.NOT_FOUND
        assert str(path.parent) not in error.message

    @pytest.mark.parametrize("code", [TensorProto.COMPLEX64, TensorProto.FLOAT8E4M3FN, TensorProto.INT4])
    def test_a_tensor_of_an_unsupported_type_is_rejected_by_name(self, path: Path, code: int) -> None:
        save(path, [node("Cast", ["in"], ["out"], to=FLOAT)], [value("in", code, ["N"])], [value("out", FLOAT, ["N"])])
        model = onnx.load(path)
        model.opset_import[0].version = 21
        model.ir_version = 10
        onnx.save(model, path)

        assert "in" in refusal(path).message

    def test_a_sequence_input_is_rejected_by_name(self, path: Path) -> None:
        save(
            path,
            [node("SequenceLength", ["x"], ["y"])],
            [helper.make_tensor_sequence_value_info("x", FLOAT, None)],
            [value("y", INT64, [])],
        )
        error = refusal(path)

        assert error.code is Code.UNSUPPORTED
        assert error.message == "input 'x' is seq(tensor(float)), which Penstock does not support"

    def test_a_bfloat16_output_of_a_model_with_strings_is_rejected_by_name(self, path: Path) -> None:
        save(
            path,
            [node("Cast", ["x"], ["y"], to=BFLOAT16)],
            [value("x", STRING, ["N"])],
            [value("y", BFLOAT16, ["N"])],
        )
        error = refusal(path)

        assert "y" in error.message

    @pytest.mark.parametrize("device", ["gpu", "cuda", "cuda:x", "cuda:-1"])
    def test_a_malformed_device_is_rejected_with_the_expected_form(self, path: Path, device: str) -> None:
        contract_model("rows", path)

        assert f"device '{device}': expected 'cpu' or 'cuda:<number>'" == refusal(path, device).message

    @pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="CUDA is here")
    def test_a_gpu_without_a_cuda_build_is_rejected_with_the_install_command(self, path: Path) -> None:
        contract_model("rows", path)

        error = refusal(path, "cuda:0")

        assert error.code is Code.UNSUPPORTED
        assert "pip install 'penstock[gpu]'" in error.message

    @pytest.mark.parametrize(
        ("name", "bad"),
        [
            ("intra_op_thread_count", "many"),
            ("inter_op_thread_count", "-1"),
            ("execution_mode", "2"),
            ("enable_mem_arena", "yes"),
            ("graph_optimization_level", "9"),
        ],
    )
    def test_an_invalid_option_is_rejected_by_name(self, path: Path, name: str, bad: str) -> None:
        contract_model("rows", path)

        assert refusal(path, **{name: bad}).message.startswith(f"option '{name}' must be ")


class TestOptions:
    def test_the_default_session_options_suit_a_shared_machine(self) -> None:
        options = session_options({})

        assert usable_cpus() == options.intra_op_num_threads
        assert options.inter_op_num_threads == 1
        for name in ("session.intra_op.allow_spinning", "session.inter_op.allow_spinning"):
            assert options.get_session_config_entry(name) == "0"
        assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL

    def test_options_reach_the_session(self) -> None:
        options = session_options(
            {
                "intra_op_thread_count": "3",
                "inter_op_thread_count": "2",
                "execution_mode": "1",
                "enable_mem_arena": "0",
                "enable_mem_pattern": "true",
                "graph_optimization_level": "basic",
                "session.intra_op.allow_spinning": "1",
            }
        )

        assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
        assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
        assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (False, True)
        assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"


@pytest.mark.parametrize("position", [0, 1])
def test_a_run_releases_the_gil(path: Path, position: int) -> None:
    """Output 0 is bound, output 1 is too large for it."""
    size = 1024
    nodes = [node("MatMul", [f"v{i}" if i else "x", "w"], [f"v{i + 1}"]) for i in range(10)]
    nodes += [node("Identity", ["v10"], ["wide"]), node("ReduceMax", ["v10"], ["narrow"], axes=[1])]
    outputs = [value("narrow", FLOAT, ["N", 1]), value("wide", FLOAT, ["N", size])]
    save(path, nodes, [value("x", FLOAT, ["N", size])], outputs, {"w": np.zeros((size, size), np.float32)})
    backend = load(path, "cpu", {"intra_op_thread_count": "1"})
    binding = backend.bind(batched(backend.graph), 64)
    infer(binding, [np.zeros((64, size), np.float32)], (position,))

    assert gil.is_left_by(lambda: binding.run((position,)))


def test_closing_frees_the_session_and_the_buffers(path: Path) -> None:
    contract_model("rows", path)
    backend = load(path, "cpu", {})
    binding: Any = backend.bind(batched(backend.graph), 4)
    result = infer(binding, [float_rows(4)])[0]
    slab = weakref.ref(binding.acquire_buffers(4, [(4, 4)])[0].base)
    sessions = weakref.ref(_session(backend))

    backend.close()
    gc.collect()

    assert sessions() is None
    assert slab() is None
    np.testing.assert_array_equal(float_rows(4) * 2, result)


@pytest.mark.slow
def test_trimming_returns_the_memory_of_a_large_request_to_the_system(path: Path) -> None:
    backend = identity(path, FLOAT, ["N", "M"])
    binding: Any = backend.bind(batched(backend.graph), 1)
    small, large = np.ones((1, 8), np.float32), np.ones((1, 50_000_000), np.float32)
    infer(binding, [small])
    before, trimmable = resident_bytes(), [binding.can_trim]

    infer(binding, [large])  # grows the slab and the arena
    trimmable.append(binding.can_trim)
    assert resident_bytes() > before + 1.9 * large.nbytes  # in the slab, and in the arena
    binding.trim_memory()
    trimmable.append(binding.can_trim)

    assert trimmable == [False, True, False]
    assert resident_bytes() < before + 0.2 * large.nbytes
    np.testing.assert_array_equal(infer(binding, [small])[0], small)


def test_a_trim_whose_run_fails_writes_nothing_to_stderr(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    in_sevens = {"to": np.array([-1, 7])}
    save(
        path,
        [node("Reshape", ["x", "to"], ["y"])],
        [value("x", FLOAT, ["N", "M"])],
        [value("y", FLOAT, ["K", 7])],
        in_sevens,
    )
    binding: Any = load(path, "cpu", {}).bind(batched(load(path, "cpu", {}).graph), 1)
    infer(binding, [np.ones((1, 9_100_000), np.float32)])
    trimmable = binding.can_trim
    binding.trim_memory()

    assert (trimmable, binding.can_trim) == (True, False)
    assert capfd.readouterr().err == ""


def test_a_binding_can_be_trimmed_after_many_large_outputs(path: Path) -> None:
    backend = identity(path, FLOAT, ["N", "M"])
    binding: Any = backend.bind(batched(backend.graph), 1)
    small, large = np.ones((1, 300_000), np.float32), np.ones((1, 1_000_000), np.float32)
    trimmable = []
    for array in [small] * 40 + [large] * 9:
        infer(binding, [array])
        trimmable.append(binding.can_trim)
    binding.trim_memory()
    infer(binding, [large])

    assert trimmable == [False] * 48 + [True]
    assert not binding.can_trim


def test_a_stop_while_buffers_are_acquired_does_not_affect_later_runs(path: Path) -> None:
    contract_model("rows", path)
    backend = load(path, "cpu", {})
    binding: Any = backend.bind(batched(backend.graph), 4)

    class Options:
        """Replaces the run's options: while its flag is set, another thread acquires buffers."""

        terminate = property(lambda self: self.set_, lambda self, value: self.put(value))

        def put(self, value: bool) -> None:
            if value:
                binding.acquire_buffers(4, [(4, 4)])
            self.set_ = value

    binding._run_options = options = Options()
    binding.stop()
    binding.acquire_buffers(4, [(4, 4)])

    assert not options.terminate


def _session(backend: OnnxBackend) -> Any:
    return next(each for each in vars(backend).values() if isinstance(each, onnxruntime.InferenceSession))
