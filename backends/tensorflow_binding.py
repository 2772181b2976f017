"""The Binding of `tensorflow.py`: how one run of a session gets its inputs and returns its outputs.

Used by `tensorflow.py` only. It needs no TensorFlow itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .backend import Array
from .errors import Code, RunStopped
from .signature import Signature, TensorSpec
from .tensorflow_failures import run_error
from .tensorflow_signature import ServedSignature

MAX_PLANS = 256
"""Shapes whose buffers are cached per Binding; the oldest is evicted first."""

Shapes = tuple[tuple[int, ...] | None, ...]


class OpenSession(Protocol):
    """A session of the model."""

    closed: bool

    def callable(self, feeds: tuple[str, ...], fetches: tuple[str, ...]) -> Callable[..., list[Any]]:
        """Return the callable that runs the graph on `feeds` for `fetches`, by TensorFlow's names."""

    def close(self) -> None:
        """End all runs: they fail."""


class LoadedSavedModel(Protocol):
    """What a Binding uses of its Backend. `defaults` are the values of absent optional inputs."""

    serving: ServedSignature
    defaults: Mapping[str, Any]
    bfloat16: Any
    on_gpu: bool

    def open_session(self) -> OpenSession:
        """Return the session to run on, opening a new one if it was closed. Raises: InferError."""

    def switch_executor(self, error: Exception) -> bool:
        """Whether the run that failed like this must start again, on a session of another kind."""


class TensorflowBinding:
    """One slab of memory per input; views of it are handed out, and TensorFlow reads them in place.

    A run is stopped by closing the session, which ends the runs of all Bindings: those that were not stopped start
    again on the next session.
    """

    def __init__(self, model: LoadedSavedModel, signature: Signature, capacity_rows: int) -> None:
        self.capacity_rows = capacity_rows
        self._model = model
        graph, tensors, unranked = model.serving.graph, model.serving.tensors, model.serving.unranked
        self._inputs = [graph.input[spec.name] for spec in signature.inputs]
        self._outputs = [graph.output[spec.name] for spec in signature.outputs]
        self._configured_shapes = [spec.shape for spec in signature.outputs]
        self._scalars = [not spec.shape and spec.name not in unranked for spec in self._inputs]
        self._feeds = tuple(tensors["input", spec.name] for spec in self._inputs)
        self._fetches = [tensors["output", spec.name] for spec in self._outputs]
        rows = capacity_rows if signature.batched else 1
        self._slabs = [
            spec.type.allocate_aligned(rows * math.prod(dim if dim > 0 else 1 for dim in spec.shape))
            for spec in self._inputs
        ]
        self._plans: dict[Shapes, list[Array | None]] = {}
        self._buffers: list[Array | None] | None = None
        self._running: OpenSession | None = None
        self._stopped = False

    def acquire_buffers(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        """Return the input buffers for a run; the same ones for the same shapes."""
        if rows > self.capacity_rows:
            raise ValueError(f"{rows} rows exceed the capacity of {self.capacity_rows}")
        key = tuple(shapes)
        buffers = self._plans.get(key)
        if buffers is None:
            buffers = self._make_plan(key)
        self._buffers = buffers
        self._stopped = False
        return buffers

    def run(self, wanted: Sequence[int]) -> list[Any]:
        """Run the model on the acquired buffers."""
        if self._buffers is None:
            raise ValueError("run without acquire_buffers")
        outputs = self._run(self._buffers, wanted)
        return [output if output.flags.owndata else output.copy() for output in outputs]

    def run_on(self, inputs: Sequence[Array | None], wanted: Sequence[int]) -> list[Array]:
        """Run the model on the caller's arrays, in the Signature's order, instead of `acquire_buffers` and `run`.

        Shapes: any; the graph decides what to do with them. None: an optional input is absent. An array that begins at
        a multiple of 64 bytes is not copied.
        Ownership: the result may be read, never written to, and only until an input is written to: it may be the
        model's own memory, or an input's. TensorFlow releases the inputs in its next call, not at once.
        Threads: as `run`. Raises: as `run`. Call after `clear_stop`.
        """
        return self._run(inputs, wanted)

    def clear_stop(self) -> None:
        """Clear a `stop`, as `acquire_buffers` does: a later one ends the next `run_on`."""
        self._stopped = False

    def stop(self) -> None:
        """End the current run: TensorFlow checks in each iteration of its loops, and while operations wait.

        A single long operation is not ended this way; only killing the process ends it for certain.
        """
        self._stopped = True
        running = self._running
        if running is not None:
            running.close()

    def release(self) -> None:
        """Release all buffers."""
        self._buffers = None
        self._plans.clear()
        self._slabs.clear()

    def _run(self, inputs: Sequence[Array | None], wanted: Sequence[int]) -> list[Array]:
        feeds = [self._feed(position, array) for position, array in enumerate(inputs)]
        fetches = tuple(name for position in wanted if (name := self._fetches[position]) not in self._feeds)
        results = iter(self._execute(feeds, fetches) if fetches else ())
        outputs = []
        for position in wanted:
            name = self._fetches[position]
            # TensorFlow cannot fetch what it was fed
            result = feeds[self._feeds.index(name)] if name in self._feeds else next(results)
            outputs.append(self._convert_output(position, result))
        return outputs

    def _execute(self, feeds: list[Any], fetches: tuple[str, ...]) -> list[Any]:
        while True:
            session = self._running = self._model.open_session()
            try:
                if self._stopped:  # read after `_running` is set: `stop` does it in the opposite order
                    raise _stopped()
                return session.callable(self._feeds, fetches)(*feeds)
            except Exception as error:
                if self._stopped:
                    raise _stopped() from error
                if not session.closed and not self._model.switch_executor(error):
                    raise run_error(error, on_gpu=self._model.on_gpu) from error
            finally:
                self._running = None

    def _feed(self, position: int, array: Array | None) -> Any:
        spec = self._inputs[position]
        if array is None:
            return self._model.defaults[spec.name]
        if spec.datatype == "BF16":
            array = array.view(self._model.bfloat16)
        return array.reshape(()) if self._scalars[position] and array.shape == (1,) else array

    def _convert_output(self, position: int, result: Any) -> Array:
        """Convert a result of TensorFlow's to an array; one without axes is a number or bytes."""
        spec = self._outputs[position]
        array = result if isinstance(result, np.ndarray) else np.array(result, _dtype(spec, self._model.bfloat16))
        if spec.datatype == "BF16":
            array = array.view(np.uint16)
        return array.reshape(1) if not array.shape and self._configured_shapes[position] == (1,) else array

    def _make_plan(self, shapes: Shapes) -> list[Array | None]:
        for position, shape in enumerate(shapes):
            if shape is not None and math.prod(shape) > self._slabs[position].size:
                # at least doubled, so that gradual growth ends soon
                size = max(math.prod(shape), 2 * self._slabs[position].size)
                self._slabs[position] = self._inputs[position].type.allocate_aligned(size)
                self._plans.clear()
        buffers = [
            None if shape is None else slab[: math.prod(shape)].reshape(shape)
            for slab, shape in zip(self._slabs, shapes, strict=True)
        ]
        if len(self._plans) >= MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[shapes] = buffers
        return buffers


def _dtype(spec: TensorSpec, bfloat16: Any) -> Any:
    return bfloat16 if spec.datatype == "BF16" else spec.type.dtype


def _stopped() -> RunStopped:
    return RunStopped(Code.EXPIRED, "the run was terminated because it took too long")
