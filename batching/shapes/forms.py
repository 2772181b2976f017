"""Forms: how request tensors are laid out in a run, for models where that is not plain concatenated rows.

These are rows at fixed places, reshaped, ragged and shape tensors, and inputs that no client sends. Used by
execution.py, and by code that runs a model on zeros before there are requests (dummy_inputs.py, rowwise.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.errors import Code, InferError
from penstock.backends.gathering import gather, repeat_last_row
from penstock.backends.signature import TensorSpec

from .derived import DerivedInput, OutputStore, ZeroInput, make_derived, stored_names, zero
from .ragged import BatchInput, RaggedSource, ScatterForm
from .reshape import Dims, Reshape

if TYPE_CHECKING:
    from penstock.backends.backend import Array, BufferSource
    from penstock.batching.running.batch import Batch
    from penstock.batching.spec import ModelSpec


def forms_of(spec: ModelSpec) -> Forms | None:
    """Return the Forms of a completed spec; None if its tensors are plain concatenated rows."""
    return None if spec.binding_signature is None and spec.sequence is None else Forms(spec)


def row_count(output: Any) -> int:
    """Count an output's rows; -1 if it has no row axis, such as a scalar."""
    try:
        return len(output)
    except TypeError:
        return -1


def row_count_error(model: str, output: str, value: Any, ran_rows: int) -> InferError:
    """Make the error for an output whose rows are not those of the batch."""
    rows = row_count(value)
    has = f"{rows} rows" if rows >= 0 else "no batch axis"
    text = f"model '{model}': output '{output}' has {has} for a batch of {ran_rows}"
    return InferError(Code.INTERNAL, f"{text}; set max_batch_size to 0 if its first axis is not the batch")


def fill_padding_rows(buffer: Array, rows: int) -> None:
    """Fill the rows of a run from `rows` on with copies of the one before, or with zeros if there is none.

    A model that divides by a row's norm, or looks a row up, handles copies as well as it handles the original.
    """
    if not rows:
        buffer[...] = zero(buffer)
    elif rows < len(buffer):
        repeat_last_row(buffer, rows)


def row_spans(batch: Batch) -> Iterator[tuple[int, int]]:
    """Yield the rows of the run that each request has, as start and stop."""
    stop = 0
    for number, request in enumerate(batch.requests):
        start = stop if batch.row_positions is None else batch.row_positions[number]
        stop = start + request.rows
        yield start, stop


def _input_arrays(batch: Batch, position: int) -> list[Array]:
    """List one input of each request: either all have it or none has."""
    return [request.inputs[position] for request in batch.requests]  # type: ignore[misc]


class RowsForm:
    """Rows, each request's at its place. For a model without rows, the tensor of a single request."""

    def __init__(self, spec: TensorSpec, *, batched: bool) -> None:
        dims = spec.shape[1:] if batched else spec.shape
        self._reshape = None if spec.reshape is None else Reshape(dims, spec.reshape)
        self._name = spec.name
        self._batched = batched

    def shape(self, batch: Batch, position: int, ran_rows: int) -> Dims:
        """Return an input's whole shape in a run."""
        dims = batch.key[position] or ()
        model_dims = dims if self._reshape is None else self._reshape.to_model(dims)
        return (ran_rows, *model_dims) if self._batched else model_dims

    def gather(self, batch: Batch, position: int, buffer: Array, ran_rows: int) -> None:
        """Write an input. Rows without a request are zeros; padding rows at the end are copies of the last one."""
        if self._reshape is not None:
            dims = batch.key[position] or ()
            buffer = buffer.reshape((ran_rows, *dims) if self._batched else dims)
        if not self._batched:
            np.copyto(buffer, _input_arrays(batch, position)[0])
        elif batch.row_positions is None:
            gather(_input_arrays(batch, position), buffer[: batch.rows])
            fill_padding_rows(buffer, batch.rows)
        else:
            buffer[...] = zero(buffer)
            for (start, stop), array in zip(row_spans(batch), _input_arrays(batch, position), strict=True):
                buffer[start:stop] = array

    def to_model(self, array: Array) -> Array:
        """View a client's array in the model's shape. Ownership: a view if possible."""
        if self._reshape is None:
            return array
        shape = array.shape
        return array.reshape((*shape[: self._batched], *self._reshape.to_model(shape[self._batched :])))

    def to_client(self, model: str, output: Any) -> Any:
        """View an output in the clients' shape; None stays. Ownership: a view if possible. Raises: InferError."""
        if self._reshape is None or output is None:
            return output
        shape = output.shape
        try:
            return output.reshape((*shape[: self._batched], *self._reshape.to_client(shape[self._batched :])))
        except ValueError as error:
            text = f"model '{model}': output '{self._name}' has shape {list(shape)}, which cannot be reshaped"
            raise InferError(Code.INTERNAL, f"{text} as configured: {error}") from error

    def split(self, model: str, output: Any, batch: Batch) -> list[Any]:
        """Return each request's rows of an output. Ownership: views. Raises: InferError (INTERNAL)."""
        output = self.to_client(model, output)
        return [output[start:stop] for start, stop in row_spans(batch)] if self._batched else [output]


class FlatForm:
    """A ragged input: all requests' elements concatenated."""

    def shape(self, batch: Batch, position: int, ran_rows: int) -> Dims:
        """Return its shape in a run."""
        return (sum([array.size for array in _input_arrays(batch, position)]),)

    def gather(self, batch: Batch, position: int, buffer: Array, ran_rows: int) -> None:
        """Write it."""
        gather([array.reshape(-1) for array in _input_arrays(batch, position)], buffer)


class ShapeValuesForm:
    """A shape tensor of a model with rows: the values that all requests of a batch share, once.

    The first is the number of rows that run; the Key holds the others.
    """

    def shape(self, batch: Batch, position: int, ran_rows: int) -> Dims:
        """Return its shape in a run."""
        return (1 + len(batch.key[position] or ()),)

    def gather(self, batch: Batch, position: int, buffer: Array, ran_rows: int) -> None:
        """Write it."""
        buffer[...] = (ran_rows, *(batch.key[position] or ()))


class Forms:
    """The Forms of one model.

    `has_value_keys`: requests share a batch only if certain values are equal (request_checks.values_key).
    Threads: read-only, except for the contents of `output_store`.
    """

    def __init__(self, spec: ModelSpec) -> None:
        signature = spec.signature
        if signature is None:
            raise ValueError("the spec must be completed first")
        bound = spec.binding_signature or signature
        self.derived: tuple[DerivedInput, ...]
        self.output_store: OutputStore | None
        self.derived, self.output_store = make_derived(spec)
        self._batched = signature.batched
        self._inputs = [_input_form(each, batched=signature.batched) for each in signature.inputs]
        sources = {each.name: RaggedSource(signature, each.sources[0]) for each in spec.batch_outputs}
        self._outputs: list[RowsForm | ScatterForm] = [
            ScatterForm(each.name, each.shape, sources[each.name])
            if each.name in sources
            else RowsForm(each, batched=signature.batched)
            for each in signature.outputs
        ]
        self.has_value_keys = any(isinstance(form, ShapeValuesForm) for form in self._inputs)
        names = [each.name for each in bound.outputs]
        self._names = names
        self.stored_positions = tuple(names.index(name) for name in stored_names(spec))

    def without_requests(self) -> Forms:
        """Return Forms that gather batches of zeros, including the inputs derived from sequences."""
        forms = copy(self)
        forms.derived = tuple(
            each if isinstance(each, BatchInput) else ZeroInput(each.spec, batched=self._batched)
            for each in self.derived
        )
        return forms

    def to_model(self, inputs: Sequence[Array | None]) -> list[Array | None]:
        """View a request's inputs in the model's shapes; for an ensemble, which gathers nothing."""
        return [
            form.to_model(array) if isinstance(form, RowsForm) and array is not None else array
            for form, array in zip(self._inputs, inputs, strict=True)
        ]

    def to_client(self, model: str, wanted: Sequence[int], outputs: Sequence[Any]) -> list[Any]:
        """View an ensemble's outputs in the clients' shapes. Raises: InferError (INTERNAL)."""
        forms = [self._outputs[position] for position in wanted]
        return [
            form.to_client(model, output) if isinstance(form, RowsForm) else output
            for form, output in zip(forms, outputs, strict=True)
        ]

    def run_positions(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Return the outputs that a run must make: those wanted and those kept."""
        return (*wanted, *(position for position in self.stored_positions if position not in wanted))

    def gather(self, binding: BufferSource, batch: Batch, ran_rows: int) -> None:
        """Borrow the buffers for a batch and write them."""
        shapes: list[Dims | None] = [
            None if batch.key[position] is None else form.shape(batch, position, ran_rows)
            for position, form in enumerate(self._inputs)
        ]
        shapes += [derived.shape(batch, ran_rows) for derived in self.derived]
        buffers = binding.acquire_buffers(ran_rows, shapes)
        for position, (form, buffer) in enumerate(zip(self._inputs, buffers, strict=False)):
            if buffer is not None:
                form.gather(batch, position, buffer, ran_rows)
        for derived, buffer in zip(self.derived, buffers[len(self._inputs) :], strict=True):
            if buffer is not None:
                derived.fill(buffer, batch)

    def scatter(self, model: str, batch: Batch, ran_rows: int, outputs: dict[int, Any]) -> None:
        """Give each request its outputs, and kept outputs to their keeper. `outputs`: by position.

        Nothing is given out unless all outputs are valid. Raises: InferError (INTERNAL).
        """
        if self._batched:
            for position, output in outputs.items():
                is_scattered = position < len(self._outputs) and isinstance(self._outputs[position], ScatterForm)
                if not is_scattered and row_count(output) != ran_rows:
                    raise row_count_error(model, self._names[position], output, ran_rows)
        requested = {position for request in batch.requests for position in request.output_positions}
        parts = {position: self._outputs[position].split(model, outputs[position], batch) for position in requested}
        if self.output_store is not None:
            self.output_store.store(batch, [outputs[stored] for stored in self.stored_positions])
        for number, request in enumerate(batch.requests):
            request.outputs = [parts[position][number] for position in request.output_positions]


def _input_form(spec: TensorSpec, *, batched: bool) -> RowsForm | FlatForm | ShapeValuesForm:
    if spec.ragged:
        return FlatForm()
    return ShapeValuesForm() if spec.is_shape and batched else RowsForm(spec, batched=batched)
