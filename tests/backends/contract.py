"""The test cases that every Backend must pass.

A test module subclasses `BackendContract` and defines `make`; the models are those of `MODELS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.backends.backend import Array, Backend, Binding
from penstock.backends.errors import InferError, RunStopped
from penstock.backends.signature import Signature, TensorSpec

PATIENCE_S = 10.0

MODELS = {
    # doubled = 2 x; total = the sum of each row
    "rows": Signature(
        (TensorSpec("x", "FP32", (-1, 4)),),
        (TensorSpec("doubled", "FP32", (-1, 4)), TensorSpec("total", "FP32", (-1,))),
    ),
    # y = x + 1, any width
    "free": Signature((TensorSpec("x", "INT64", (-1, -1)),), (TensorSpec("y", "INT64", (-1, -1)),)),
    # y = a * b, no axis for rows, b a scalar; y_total a scalar
    "scalar": Signature(
        (TensorSpec("a", "FP64", (2, 3)), TensorSpec("b", "FP64", ())),
        (TensorSpec("y", "FP64", (2, 3)), TensorSpec("y_total", "FP64", ())),
    ),
    # y is x
    "strings": Signature((TensorSpec("x", "BYTES", (-1, 2)),), (TensorSpec("y", "BYTES", (-1, 2)),)),
    # y = x + offset, offset 10 when absent
    "optional": Signature(
        (TensorSpec("x", "FP32", (-1, 2)), TensorSpec("offset", "FP32", (2,), optional=True)),
        (TensorSpec("y", "FP32", (-1, 2)),),
    ),
    # y = x, after a loop of as many turns as the largest of `turns`
    "turns": Signature(
        (TensorSpec("x", "FP32", (-1,)), TensorSpec("turns", "INT64", (-1,))), (TensorSpec("y", "FP32", (-1,)),)
    ),
    # y = table[x], a table of 3; anything else fails
    "picky": Signature((TensorSpec("x", "INT64", (-1,)),), (TensorSpec("y", "FP32", (-1,)),)),
}
TABLE = np.array([10.0, 20.0, 30.0], np.float32)
ENDLESS = 1 << 60
"""A number of turns that never ends."""


def infer(binding: Binding, inputs: Sequence[Array | None], positions: tuple[int, ...] = (0,)) -> list[Any]:
    """Acquire buffers, fill them and run. A Binding for one row counts as one without rows, as in the Engine."""
    rows = 1 if binding.capacity_rows == 1 or inputs[0] is None else inputs[0].shape[0]
    buffers = binding.acquire_buffers(rows, [None if array is None else array.shape for array in inputs])
    for buffer, array in zip(buffers, inputs, strict=True):
        if buffer is not None:
            buffer[...] = array
    return binding.run(positions)


def batched(graph: Signature) -> Signature:
    """Mark axis 0 of every tensor as rows."""
    return replace(graph, batched=True)


def float_rows(count: int, first: float = 0.0) -> Array:
    """Make rows of 4, all different."""
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4) + np.float32(first)


class BackendContract:
    """Tests over `make(name)`, which loads the model MODELS[name]."""

    def make(self, name: str) -> Backend:
        raise NotImplementedError

    @pytest.mark.parametrize("name", MODELS)
    def test_reports_the_signature_of_the_model(self, name: str) -> None:
        backend = self.make(name)

        assert MODELS[name] == backend.graph
        assert backend.platform

    def test_describes_its_nodes_to_hooks_in_the_order_of_the_graph(self) -> None:
        backend = self.make("rows")

        assert [node.name for node in backend.node_inputs] == ["x"]
        assert [node.name for node in backend.node_outputs] == ["doubled", "total"]

    @pytest.mark.parametrize("rows", [1, 3, 8])
    def test_runs_any_number_of_rows_up_to_its_capacity(self, rows: int) -> None:
        backend = self.make("rows")
        binding = backend.bind(batched(backend.graph), 8)

        doubled, total = infer(binding, [float_rows(rows)], (0, 1))

        np.testing.assert_array_equal(float_rows(rows) * 2, doubled)
        np.testing.assert_array_equal(float_rows(rows).sum(axis=1), total)

    def test_rejects_more_rows_than_its_capacity(self) -> None:
        backend = self.make("rows")
        binding = backend.bind(batched(backend.graph), 8)

        with pytest.raises(ValueError, match="9 rows"):
            binding.acquire_buffers(9, [(9, 4)])

    def test_runs_zero_rows(self) -> None:
        backend = self.make("rows")
        binding = backend.bind(batched(backend.graph), 8)

        doubled, total = infer(binding, [float_rows(0)], (0, 1))

        assert doubled.shape == (0, 4)
        assert total.shape == (0,)

    def test_acquires_buffers_of_the_requested_shapes_and_types(self) -> None:
        backend = self.make("rows")
        buffers = backend.bind(batched(backend.graph), 8).acquire_buffers(5, [(5, 4)])

        assert [buffer.shape for buffer in buffers if buffer is not None] == [(5, 4)]
        assert [np.dtype(np.float32)] == [buffer.dtype for buffer in buffers if buffer is not None]
        assert all(buffer.flags.c_contiguous for buffer in buffers if buffer is not None)

    @pytest.mark.parametrize("positions", [(0,), (1,), (0, 1), (1, 0)])
    def test_returns_the_requested_outputs_in_the_requested_order(self, positions: tuple[int, ...]) -> None:
        backend = self.make("rows")
        binding = backend.bind(batched(backend.graph), 8)
        all_outputs = [float_rows(2) * 2, float_rows(2).sum(axis=1)]

        outputs = infer(binding, [float_rows(2)], positions)

        assert len(positions) == len(outputs)
        for position, output in zip(positions, outputs, strict=True):
            np.testing.assert_array_equal(all_outputs[position], output)

    @pytest.mark.parametrize("name", ["rows", "free"])
    def test_a_later_run_does_not_overwrite_an_output(self, name: str) -> None:
        backend = self.make(name)
        binding = backend.bind(batched(backend.graph), 4)
        dtype = backend.graph.inputs[0].type.dtype
        first = infer(binding, [np.full((4, 4), 1, dtype)])[0]
        copy = first.copy()

        second = infer(binding, [np.full((4, 4), 7, dtype)])[0]
        second[...] = 0
        third = infer(binding, [np.full((4, 4), 7, dtype)])[0]

        np.testing.assert_array_equal(copy, first)
        assert not np.array_equal(second, third)

    def test_an_acquired_buffer_keeps_its_content_until_the_next_acquisition(self) -> None:
        backend = self.make("rows")
        binding = backend.bind(batched(backend.graph), 4)
        infer(binding, [float_rows(3)])

        np.testing.assert_array_equal(float_rows(3) * 2, binding.run((0,))[0])

    def test_bindings_run_independently_in_parallel(self) -> None:
        backend = self.make("rows")
        bindings = [backend.bind(batched(backend.graph), 64) for _ in range(2)]

        def work(position: int) -> bool:
            rows = float_rows(64, first=1000.0 * position)
            return all(np.array_equal(rows * 2, infer(bindings[position], [rows])[0]) for _ in range(50))

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(work, range(2))) == [True, True]

    def test_free_axes_may_change_from_run_to_run(self) -> None:
        backend = self.make("free")
        binding = backend.bind(batched(backend.graph), 4)

        for rows, width in [(1, 1), (4, 100), (2, 3), (4, 1000), (1, 1), (3, 0)]:
            array = np.arange(rows * width, dtype=np.int64).reshape(rows, width)

            np.testing.assert_array_equal(array + 1, infer(binding, [array])[0])

    def test_a_scalar_of_the_model_is_presented_as_one_element(self) -> None:
        backend = self.make("scalar")
        shown = Signature(
            (backend.graph.inputs[0], replace(backend.graph.inputs[1], shape=(1,))),
            (backend.graph.outputs[0], replace(backend.graph.outputs[1], shape=(1,))),
        )
        binding = backend.bind(shown, 1)

        y, total = infer(binding, [np.full((2, 3), 2.0), np.array([5.0])], (0, 1))

        np.testing.assert_array_equal(np.full((2, 3), 10.0), y)
        np.testing.assert_array_equal([60.0], total)

    def test_strings_are_passed_and_returned_as_bytes(self) -> None:
        backend = self.make("strings")
        binding = backend.bind(batched(backend.graph), 4)
        strings = np.array([[b"", "é".encode()], [b"nul\x00inside", b"end\x00"]], dtype=object)

        (given_back,) = infer(binding, [strings])

        assert strings.tolist() == given_back.tolist()
        assert np.dtype(object) == given_back.dtype

    def test_an_optional_input_may_be_absent(self) -> None:
        backend = self.make("optional")
        binding = backend.bind(backend.graph, 1)
        x = np.ones((3, 2), np.float32)

        assert binding.acquire_buffers(1, [(3, 2), None])[1] is None
        np.testing.assert_array_equal(x + 10, infer(binding, [x, None])[0])
        np.testing.assert_array_equal(x + 2, infer(binding, [x, np.full(2, 2, np.float32)])[0])

    def test_a_run_succeeds_after_a_failed_run(self) -> None:
        backend = self.make("picky")
        binding = backend.bind(batched(backend.graph), 4)

        for _ in range(2):
            with pytest.raises(InferError):
                infer(binding, [np.array([0, 7])])
            np.testing.assert_array_equal(TABLE[[2, 1]], infer(binding, [np.array([2, 1])])[0])

    @pytest.mark.parametrize("rows", [2, 20_000])
    def test_a_stopped_run_raises_run_stopped_and_the_next_run_succeeds(self, rows: int) -> None:
        """Whether the run is stopped before or after it starts is left to chance: it ends either way."""
        backend = self.make("turns")
        binding = backend.bind(batched(backend.graph), rows)
        x, once, endless = np.ones(rows, np.float32), np.ones(rows, np.int64), np.full(rows, ENDLESS)

        for _ in range(2):
            for buffer, array in zip(binding.acquire_buffers(rows, [(rows,), (rows,)]), (x, endless), strict=True):
                buffer[...] = array  # type: ignore[index]
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(binding.run, (0,))
                binding.stop()
                with pytest.raises(RunStopped):
                    running.result(PATIENCE_S)
            np.testing.assert_array_equal(x, infer(binding, [x, once])[0])

    def test_stopping_an_idle_binding_does_not_affect_later_runs(self) -> None:
        backend = self.make("turns")
        binding = backend.bind(batched(backend.graph), 1)
        infer(binding, [np.ones(1, np.float32), np.ones(1, np.int64)])
        binding.stop()

        assert infer(binding, [np.ones(1, np.float32), np.ones(1, np.int64)])[0].tolist() == [1.0]

    def test_a_backend_can_be_closed(self) -> None:
        backend = self.make("rows")
        backend.bind(batched(backend.graph), 4)

        backend.close()
