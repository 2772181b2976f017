"""The Binding of `onnx.py`: how one run of an ONNX Runtime session gets its inputs and returns its outputs.

Used by `onnx.py` only. The reasons for how a run works, with figures, are in docs/adr/0004-onnx-runtime-binding.md.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime

from .backend import Array
from .errors import Code, InferError
from .gathering import copy_array
from .onnx_failures import failure_kind, run_error, without_status
from .onnx_values import bf16_bits, decode_strings, encode_strings, ort_value
from .signature import Signature, TensorSpec

BOUND_OUTPUT_BYTES = 65536
"""Up to this size an output is written into a bound buffer and copied out; above, ONNX Runtime's own fresh memory is
returned. Equal at 64 KiB (3.8 and 4.0 us), 38 against 17 us at 1 MiB: docs/adr/0004."""
MAX_PLANS = 256
"""Shapes cached per Binding; the oldest is evicted first."""
MAX_BOUND_RUNS = 8
MAX_FAILURE_KINDS = 64
"""Kinds of failures whose status is cached."""
LARGE_BYTES = 1 << 25
"""If the inputs of one run, or large outputs of many together, exceed this, their memory is released when the Binding
is idle."""
LARGE_OUTPUT_BYTES = 1 << 21
"""From this size on, an output may wait to be encoded beside many others, each occupying arena memory."""


class BoundRun:
    """A run for one set of shapes and outputs, with everything bound: it is one call, which takes `bound`."""

    __slots__ = ("binding", "bound", "outputs")

    def __init__(self, binding: Any, outputs: list[Array]) -> None:
        self.binding = binding
        # 3.4 us a run instead of 7.1 with its Python wrapper, which handles WebGPU
        self.bound = getattr(binding, "_iobinding", binding)
        self.outputs = outputs


class RunPlan:
    """What every run with the same input shapes shares. `bound_runs` has None where outputs cannot be bound."""

    __slots__ = ("bound_runs", "buffers", "feeds", "rows")

    def __init__(self, rows: int, buffers: list[Array | None], feeds: dict[str, Any]) -> None:
        self.rows = rows
        self.buffers = buffers
        self.feeds = feeds
        self.bound_runs: dict[tuple[int, ...], BoundRun | None] = {}


class OnnxBinding:
    """One slab of memory per input and per small output of known shape; views of it are bound once per shape.

    A run with everything bound is one call. Everything else (strings, sequences, maps, free output shapes, outputs
    above BOUND_OUTPUT_BYTES, optional inputs) is fed to `session.run`, which returns fresh memory.
    """

    bound_bytes = BOUND_OUTPUT_BYTES
    never_empty = ""
    """An operator that crashes the process if its input has no rows, if the model has one."""

    def __init__(
        self, session: Any, graph: Signature, signature: Signature, capacity_rows: int, run_options: Any
    ) -> None:
        self.capacity_rows = capacity_rows
        self._session = session
        self._run_options = run_options
        self._run_bound = getattr(session, "_sess", session).run_with_iobinding
        self._on_gpu = session.get_providers()[0] != "CPUExecutionProvider"
        self._stopped = False
        # kind of failure -> its code, and the prefix of its text when it is fed
        self._failure_kinds: dict[str, tuple[Code, str]] = {}
        self._last_failure = "", Code.INTERNAL, ""
        self._signature = signature
        self._inputs = [(spec, graph.input[spec.name]) for spec in signature.inputs]
        self._outputs = [(spec, graph.output[spec.name]) for spec in signature.outputs]
        input_names = {spec.name for spec in signature.inputs}
        self._passthrough_outputs = {i for i, spec in enumerate(signature.outputs) if spec.name in input_names}
        self._strings = [spec.name for spec in signature.inputs if spec.datatype == "BYTES"]
        self._bindable = {i for i in range(len(self._outputs)) if self._is_bindable(i)}
        self._input_slabs = [self._new_slab(graph, self._initial_size(spec.shape)) for spec, graph in self._inputs]
        self._output_slabs: dict[int, Array] = {}
        self._plans: dict[tuple[tuple[int, ...] | None, ...], RunPlan] = {}
        self._plan: RunPlan | None = None
        self.can_trim = False
        self._returned_bytes = 0

    def acquire_buffers(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        """Return the input buffers for a run; the same ones for the same shapes."""
        key = tuple(shapes)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(rows, key)
        self._plan = plan
        if self._stopped:
            self._clear_stop()
        return plan.buffers

    def run(self, wanted: Sequence[int]) -> list[Any]:
        """Run the model on the acquired buffers."""
        plan = self._plan
        if plan is None:
            raise ValueError("run without acquire_buffers")
        key = tuple(wanted)
        try:
            bound_run = plan.bound_runs[key]
        except KeyError:
            bound_run = self._bind_run(plan, key)
        if bound_run is None:
            return self._run_fed(plan, key)
        try:
            self._run_bound(bound_run.bound, self._run_options)
        except Exception as error:  # noqa: BLE001 - it does not say who is to blame; a fed run does
            return self._retry_fed(plan, key, error)
        return [copy_array(output) for output in bound_run.outputs]

    def stop(self) -> None:
        """End the current run: ONNX Runtime checks the flag between two nodes."""
        # in this order: otherwise `acquire_buffers` would clear a flag that is set after it, and nothing could run
        self._run_options.terminate = True
        self._stopped = True

    def _clear_stop(self) -> None:
        """Clear a stop request; in an order that lets the next `acquire_buffers` see a `stop` made meanwhile."""
        self._stopped = False
        self._run_options.terminate = False

    def trim_memory(self) -> None:
        """Release what large requests left behind: the slabs that they grew, and the arena's memory for them.

        ONNX Runtime's arena shrinks only at the end of a run, so one is made, on zeros, as small as the model accepts.
        """
        if not self.can_trim:
            return
        self._plans.clear()
        for position, (spec, graph) in enumerate(self._inputs):
            self._input_slabs[position] = self._new_slab(graph, self._initial_size(spec.shape))
        shapes = [tuple([dim if dim > 0 else 1 for dim in spec.shape]) for spec, _ in self._inputs]
        plan = self._make_plan(1, tuple(shapes))
        for buffer in plan.buffers:
            if buffer is not None:
                buffer.fill(b"" if buffer.dtype.hasobject else 0)
        saved_options, self._run_options = self._run_options, onnxruntime.RunOptions()
        self._run_options.log_severity_level = 4  # as in `saved_options`; a failure on zeros is expected
        self._run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        try:
            with contextlib.suppress(InferError):  # there is no arena, or the model rejects zeros
                self._run_fed(plan, (0,))
        finally:
            self._run_options, self._plan, self.can_trim, self._returned_bytes = saved_options, None, False, 0

    def release(self) -> None:
        """Release the session and all buffers."""
        self._session = self._run_bound = self._plan = None
        self._plans.clear()
        self._input_slabs.clear()
        self._output_slabs.clear()

    def _is_bindable(self, position: int) -> bool:
        graph = self._outputs[position][1]
        if not graph.shape or not graph.is_tensor or graph.datatype == "BYTES" or self._strings:
            return False  # ONNX Runtime also returns () if the rank is unknown
        if self._outputs[position][0].ragged or any(graph.name == each.name for _, each in self._inputs):
            return False  # an output that is an input: ONNX Runtime writes nothing into a buffer bound for it
        if any(graph.optional for _, graph in self._inputs) or not self._inputs:
            return False
        if self._signature.batched:
            return graph.shape[0] == -1 and -1 not in graph.shape[1:]
        return -1 not in graph.shape

    def _initial_size(self, shape: tuple[int, ...]) -> int:
        """Return the size of a slab for all rows with free axes of 1; larger ones grow it when they are acquired."""
        rows = self.capacity_rows if self._signature.batched else 1
        return rows * math.prod(dim if dim > 0 else 1 for dim in shape)

    def _make_plan(self, rows: int, shapes: tuple[tuple[int, ...] | None, ...]) -> RunPlan:
        if rows > self.capacity_rows:
            raise ValueError(f"{rows} rows exceed the capacity of {self.capacity_rows}")
        if self.never_empty:
            self._check_not_empty(shapes)
        buffers: list[Array | None] = []
        for position, shape in enumerate(shapes):
            if shape is not None and math.prod(shape) > self._input_slabs[position].size:
                self._grow(position, math.prod(shape))
        feeds: dict[str, Any] = {}
        for (spec, graph), slab, shape in zip(self._inputs, self._input_slabs, shapes, strict=True):
            if shape is None:
                buffers.append(None)
                continue
            buffer = slab[: math.prod(shape)].reshape(shape)
            buffers.append(buffer)
            view = buffer.reshape(()) if not graph.shape and shape == (1,) else buffer
            feeds[spec.name] = ort_value(view, graph) if graph.datatype == "BF16" else view
        plan = RunPlan(rows, buffers, feeds)
        self.can_trim = self.can_trim or sum([buffer.nbytes for buffer in buffers if buffer is not None]) > LARGE_BYTES
        if len(self._plans) >= MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[shapes] = plan
        return plan

    def _check_not_empty(self, shapes: tuple[tuple[int, ...] | None, ...]) -> None:
        """Check that no input is without elements. Raises: InferError (INVALID)."""
        for (spec, _), shape in zip(self._inputs, shapes, strict=True):
            if shape is not None and 0 in shape:
                text = f"input '{spec.name}' has no elements: got {list(shape)}"
                text += f", but ONNX Runtime cannot run the model's operator {self.never_empty} on empty tensors"
                raise InferError(Code.INVALID, text)

    def _new_slab(self, spec: TensorSpec, size: int) -> Array:
        return spec.type.allocate_aligned(size)

    def _grow(self, position: int, size: int) -> None:
        """Replace a slab that is too small; at least doubles it, so that gradual growth ends soon."""
        old = self._input_slabs[position]
        self._input_slabs[position] = self._new_slab(self._inputs[position][1], max(size, 2 * old.size))
        self._plans.clear()

    def _bind_run(self, plan: RunPlan, wanted: tuple[int, ...]) -> BoundRun | None:
        if len(plan.bound_runs) >= MAX_BOUND_RUNS:
            plan.bound_runs.clear()
        plan.bound_runs[wanted] = bound_run = self._bind_all(plan, wanted) if self._can_bind(plan, wanted) else None
        return bound_run

    def _can_bind(self, plan: RunPlan, wanted: tuple[int, ...]) -> bool:
        return (
            bool(wanted)
            and self._bindable.issuperset(wanted)
            and all(
                0
                < math.prod(self._output_shape(plan, position)) * self._outputs[position][1].type.size_bytes
                <= self.bound_bytes
                for position in wanted
            )
        )

    def _output_shape(self, plan: RunPlan, position: int) -> tuple[int, ...]:
        shape = self._outputs[position][1].shape
        return (plan.rows, *shape[1:]) if self._signature.batched else shape

    def _bind_all(self, plan: RunPlan, wanted: tuple[int, ...]) -> BoundRun:
        io_binding = self._session.io_binding()
        for (_, graph), buffer in zip(self._inputs, plan.buffers, strict=True):
            if buffer is not None:
                shape = () if not graph.shape and buffer.shape == (1,) else buffer.shape
                _bind(io_binding.bind_input, graph, shape, buffer)
        outputs = []
        for position in wanted:
            graph = self._outputs[position][1]
            shape = self._output_shape(plan, position)
            slab = self._output_slabs.get(position)
            if slab is None or slab.size < math.prod(shape):
                slab = self._output_slabs[position] = self._new_slab(graph, self._initial_size(graph.shape))
            output = slab[: math.prod(shape)].reshape(shape)
            _bind(io_binding.bind_output, graph, shape, output)
            outputs.append(output)
        return BoundRun(io_binding, outputs)

    def _retry_fed(self, plan: RunPlan, wanted: tuple[int, ...], error: Exception) -> list[Any]:
        """Run fed what failed with everything bound, unless the outcome of such a failure is known.

        Only a fed run says who is to blame, and a failing run costs as much as eight good ones. One request makes a
        batch and its parts fail several times with the same text.
        """
        last_text, code, message = self._last_failure
        if str(error) == last_text:
            raise InferError(code, message)
        failure = run_error(error, on_gpu=self._on_gpu)
        if type(failure) is not InferError:
            raise failure from error
        known_kind = self._failure_kinds.get(failure_kind(failure))
        if known_kind is not None:
            self._last_failure = str(error), known_kind[0], known_kind[1] + failure.message
            raise InferError(known_kind[0], known_kind[1] + failure.message) from error
        try:
            results = self._run_fed(plan, wanted)
        except InferError as fed_failure:
            if type(fed_failure) is InferError and without_status(fed_failure) == failure.message:
                if len(self._failure_kinds) >= MAX_FAILURE_KINDS:
                    del self._failure_kinds[next(iter(self._failure_kinds))]
                self._failure_kinds[failure_kind(failure)] = (
                    fed_failure.code,
                    fed_failure.message.removesuffix(failure.message),
                )
            raise
        # then the bound shape was wrong: the model's output rows are not its input rows
        self._bindable.difference_update(wanted)
        self._plans.clear()
        plan.bound_runs.clear()
        return results

    def _run_fed(self, plan: RunPlan, wanted: tuple[int, ...]) -> list[Any]:
        feeds = plan.feeds
        if self._strings:
            feeds = feeds | {name: decode_strings(name, feeds[name]) for name in self._strings if name in feeds}
        # numpy has no bfloat16, so ONNX Runtime converts none to an array
        bf16_positions = [position for position in wanted if self._outputs[position][1].datatype == "BF16"]
        results = dict(zip(bf16_positions, self._run_raw(feeds, bf16_positions), strict=True)) if bf16_positions else {}
        other_positions = [position for position in wanted if position not in results]
        if other_positions:
            names = [self._outputs[position][0].name for position in other_positions]
            try:
                arrays = self._session.run(names, feeds, self._run_options)
            except UnicodeDecodeError as error:
                text = "the model returned a string that is not UTF-8, which ONNX Runtime's Python API cannot return"
                raise InferError(Code.UNSUPPORTED, text) from error
            except Exception as error:
                raise run_error(error, on_gpu=self._on_gpu) from error
            results.update(zip(other_positions, arrays, strict=True))
            sizes = [getattr(result, "nbytes", 0) for result in arrays]
            self._returned_bytes += sum([size for size in sizes if size >= LARGE_OUTPUT_BYTES])
            self.can_trim = self.can_trim or self._returned_bytes > LARGE_BYTES
        return [self._convert_output(position, results[position]) for position in wanted]

    def _run_raw(self, feeds: dict[str, Any], positions: list[int]) -> list[Array]:
        names = [self._outputs[position][0].name for position in positions]
        values = {
            graph.name: ort_value(feed, graph) if isinstance(feed, np.ndarray) else feed
            for _, graph in self._inputs
            if (feed := feeds.get(graph.name)) is not None
        }
        try:
            results = self._session.run_with_ort_values(names, values, self._run_options)
        except Exception as error:
            raise run_error(error, on_gpu=self._on_gpu) from error
        return [bf16_bits(value) for value in results]

    def _convert_output(self, position: int, result: Any) -> Any:
        if not isinstance(result, np.ndarray):
            return result
        spec = self._outputs[position][0]
        if position in self._passthrough_outputs:
            result = result.copy()  # up to ONNX Runtime 1.25 it is the input buffer
        if spec.datatype == "BYTES":
            result = encode_strings(result)
        return result.reshape(1) if not result.shape and spec.shape == (1,) else result


def _bind(bind: Callable[..., None], spec: TensorSpec, shape: tuple[int, ...], array: Array) -> None:
    bind(spec.name, "cpu", 0, spec.type.onnx_code, shape, array.ctypes.data)
