"""Samples: configured requests (`model_warmup`) that every Instance runs before a model is ready.

Called by opening.py, before the sweep of warmup.py. Statistics do not count them. Source: Triton core,
backend_model_instance.cc (a sample of n rows is n requests of one row that share a batch, and the texts).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.backend import Array, Binding
from penstock.backends.datatypes import DATATYPES, bytes_tensor, fp32_to_bf16, parse_bytes_elements
from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest, InSequence
from penstock.batching.running.batch import Batch
from penstock.batching.running.execution import run_batch
from penstock.batching.scheduling.request_checks import check_shapes, values_key
from penstock.batching.sequences.active_sequence import ActiveSequence
from penstock.batching.sinks import FutureSink

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.spec import Sample, SampleInput

logger = logging.getLogger("penstock.batching")

_SEED = 0
_RANDOM_STRING_BYTES = 8


def run_samples_on(model: Model, bindings: Sequence[Binding], instance: int) -> None:
    """Run all samples on the Bindings of one Instance, on its own thread. Raises: as `run_samples`."""
    for each in [prepare_sample(model, sample) for sample in model.spec.samples]:
        for binding in bindings:
            each.run(str(instance), binding)


def run_samples(model: Model) -> None:
    """Run all samples of an open model, on every Binding in turn.

    Threads: that which loads it, while its Instances sleep; if the event loop never runs the model, each Instance's
    own. Raises: InferError (INVALID), naming the sample.
    """
    if not model.spec.samples:
        return
    prepared = [prepare_sample(model, sample) for sample in model.spec.samples]
    for number, instance in enumerate(model.thread_instances):
        for binding in instance.bindings:
            for each in prepared:
                run = partial(each.run, str(number), binding)
                run() if model.loop_binding is not None else instance.run_on_thread(run)
    if model.loop_binding is not None:
        for each in prepared:
            each.run("loop", model.loop_binding)


def check_samples(model: Model) -> None:
    """Check that the samples fit a model, which need not be open. Raises: InferError (INVALID), naming the sample."""
    for sample in model.spec.samples:
        prepare_sample(model, sample)


def prepare_sample(model: Model, sample: Sample) -> _PreparedSample:
    """Make a sample's values. Raises: InferError (INVALID), naming the sample."""
    try:
        return _PreparedSample(model, sample)
    except InferError as error:
        raise sample_error(sample, error.message) from error
    except (MemoryError, ValueError) as error:  # more values than fit in memory, or than numpy can count
        raise sample_error(sample, str(error)) from error


def sample_error(sample: Sample, text: str) -> InferError:
    """Make the error of a sample that did not run."""
    return InferError(Code.INVALID, f"failed to run warmup sample '{sample.name}': {text}")


class _PreparedSample:
    """One sample with its values, checked against the model like a client's request."""

    def __init__(self, model: Model, sample: Sample) -> None:
        self._model = model
        self._sample = sample
        signature = model.signature
        max_rows = model.max_rows if signature.batched else 1
        if sample.rows > max_rows:
            raise InferError(Code.INVALID, f"inference request batch-size must be <= {max_rows} for '{model.name}'")
        rng = np.random.default_rng(_SEED)
        values = {name: _values(name, sample_input, rng) for name, sample_input in sample.inputs.items()}
        for name in values:
            _check_datatype(model, name, sample.inputs[name].datatype)
        missing = [spec.name for spec in signature.inputs if not spec.optional and spec.name not in values]
        if missing:
            names = ",".join(f"'{name}'" for name in missing)
            text = f"got {len(values)} inputs for model '{model.name}', but missing required input(s) [{names}]"
            raise InferError(Code.INVALID, text)
        rows = (1,) if signature.batched else ()
        self._inputs = [
            array if array is None or spec.is_shape else array.reshape(*rows, *array.shape)
            for spec, array in ((spec, values.get(spec.name)) for spec in signature.inputs)
        ]
        shapes = [None if array is None else array.shape for array in self._inputs]
        _, self._key = check_shapes(model.name, signature, max_rows, shapes, model.padding)
        self._derived = {
            position: values[spec.name]
            for position, spec in enumerate(model.binding_signature.inputs)
            if spec.name in values and spec.name not in signature.input
        }

    def run(self, name: str, binding: Binding) -> None:
        """Run it as often as configured. Raises: InferError."""
        model, sample = self._model, self._sample
        for iteration in range(1, sample.count + 1):
            overriding = _OverridingBinding(binding, self._derived, sample.rows if model.signature.batched else 0)
            try:
                requests = self.requests(name, iteration)
                batch = Batch(requests, len(requests), requests[0].key, time.monotonic_ns())
                run_batch(model, overriding, batch)
            except InferError as error:
                raise sample_error(sample, error.message) from error
            except Exception as error:
                raise sample_error(sample, f"{type(error).__name__}: {error}") from error

    def requests(self, instance: str, iteration: int) -> list[InferRequest]:
        """Make the requests of one run, which starts now, and log that."""
        model, sample, sink = self._model, self._sample, FutureSink()
        text = "model '%s' instance %s is running warmup sample '%s' for iteration %d"
        logger.debug(text, model.name, instance, sample.name, iteration)
        requests = [
            InferRequest(model, list(self._inputs), 1, self._key, model.all_outputs, sink) for _ in range(sample.rows)
        ]
        if model.forms is not None and model.forms.has_value_keys:
            for request in requests:
                request.key = values_key(request)
        if model.spec.sequence is not None:
            has_text_ids = any(
                control.kind == "corrid" and control.datatype == "BYTES" for control in model.spec.sequence.controls
            )
            for number, request in enumerate(requests, 1):
                # whole sequences of one request that nothing else refers to
                name = str(number) if has_text_ids else number
                request.sequence, request.active_sequence = InSequence(name, start=True, end=True), ActiveSequence(name)
        return requests


class _OverridingBinding:
    """A Binding whose derived inputs, such as a sequence's controls, have the sample's values in every row.

    `rows` 0: the model has none.
    """

    def __init__(self, binding: Binding, values: Mapping[int, Array], rows: int) -> None:
        self.capacity_rows = binding.capacity_rows
        self._binding = binding
        self._values = values
        self._rows = rows
        self._buffers: list[Array | None] = []

    def acquire_buffers(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        """Lend the Binding's own buffers."""
        self._buffers = self._binding.acquire_buffers(rows, shapes)
        return self._buffers

    def run(self, wanted: Sequence[int]) -> list[Any]:
        """Write the values to their buffers, and run."""
        for position, array in self._values.items():
            buffer = self._buffers[position]
            if buffer is not None:
                part = buffer[: self._rows] if self._rows else buffer
                part[...] = array.reshape(buffer.shape[1:] if self._rows else buffer.shape)
        return self._binding.run(wanted)

    def stop(self) -> None:
        """Stop it."""
        self._binding.stop()


def _check_datatype(model: Model, name: str, datatype: str) -> None:
    spec = model.signature.input.get(name) or model.binding_signature.input.get(name)
    if spec is None:
        raise InferError(Code.INVALID, f"unexpected inference input '{name}' for model '{model.name}'")
    if spec.datatype != datatype:
        text = f"inference input '{name}' data-type is '{datatype}', but model '{model.name}' expects '{spec.datatype}'"
        raise InferError(Code.INVALID, text)


def _values(name: str, sample_input: SampleInput, rng: np.random.Generator) -> Array:
    """Make the values of one row."""
    if isinstance(sample_input.source, Path):
        return _from_file(name, sample_input, sample_input.source)
    if sample_input.source == "random":
        return _random(sample_input, rng)
    zeros = np.zeros(sample_input.shape, DATATYPES[sample_input.datatype].dtype)
    if zeros.dtype.hasobject:
        zeros.fill(b"")
    return zeros


def _random(sample_input: SampleInput, rng: np.random.Generator) -> Array:
    """Make values over an integer type's whole range, from 0 to 1 for a float type, or strings of hex digits."""
    shape, dtype = sample_input.shape, DATATYPES[sample_input.datatype].dtype
    if sample_input.datatype == "BYTES":
        texts = [rng.bytes(_RANDOM_STRING_BYTES).hex().encode() for _ in range(math.prod(shape))]
        return bytes_tensor(texts).reshape(shape)
    if sample_input.datatype == "BF16":
        return fp32_to_bf16(rng.random(shape, np.float32))
    if dtype.kind == "f":
        return rng.random(shape).astype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    bounds = np.iinfo(dtype.str)
    return rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)


def _from_file(name: str, sample_input: SampleInput, path: Path) -> Array:
    """Read a row's raw values, in wire format; trailing bytes of the file are ignored, as in Triton."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InferError(Code.INVALID, f"failed to open text file for read {path}: {error.strerror}") from error
    datatype, count = DATATYPES[sample_input.datatype], math.prod(sample_input.shape)
    if datatype.name == "BYTES":
        return _strings(name, raw, count, path.name).reshape(sample_input.shape)
    required_bytes = count * datatype.size_bytes
    if len(raw) < required_bytes:
        text = f"warmup setting expects {required_bytes} bytes, but the data provided from {path.name}"
        raise InferError(Code.INVALID, f"{text} only has {len(raw)} bytes")
    return datatype.view(raw, count).reshape(sample_input.shape)


def _strings(name: str, raw: bytes, count: int, file: str) -> Array:
    """Read length-prefixed elements."""
    elements, end = parse_bytes_elements(raw)
    if end != len(raw) or len(elements) != count:
        text = f"warmup setting expects {count} strings for input '{name}', each preceded by its length in 4 bytes"
        raise InferError(
            Code.INVALID, f"{text}, but the data provided from {file} has {len(elements)} in {len(raw)} bytes"
        )
    return bytes_tensor(elements)
