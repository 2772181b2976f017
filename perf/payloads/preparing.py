"""Preparing: from a model's description and the input options to what the generator sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.perf.generator.orders import Payloads, Target
from penstock.perf.profiling.model import ModelDescription
from penstock.perf.profiling.options import Input

from .batches import alone, check_batch, in_order
from .cuda_regions import cuda
from .grpc import GrpcWriter
from .http import HttpWriter
from .inputs import streams
from .repeated import Repeated
from .sequences import Lengths, Sequences, ids
from .shared_memory import Registrar, shared, system
from .tensors import InputError, Step
from .writing import Call, RequestedOutput, Writer, check_parameters

__all__ = ["InputError", "Prepared", "prepare_payloads"]

SEQUENCE_LENGTH = 20
"""The default length of sequences of generated data."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is sent, and notes for readers of the report, one line each."""

    payloads: Payloads
    notes: tuple[str, ...] = ()


@contextmanager
def prepare_payloads(
    model: ModelDescription,
    options: Input,
    target: Target,
    control: Registrar,
    *,
    headers: Sequence[tuple[str, str]] = (),
    slots: int = 0,
) -> Iterator[Prepared]:
    """Build all requests of a run. They may be sent until the block ends, which removes the shared memory.

    `headers` are for HTTP requests. `slots`: the most concurrent requests, among which sequences share ids; 0: unknown.
    Raises: InputError; ControlError if the server rejects shared memory; OSError if none is available.
    """
    check_batch(model, options.batch)
    check_parameters(options.parameters)
    input_data = streams(model, options)
    notes = list(input_data.notes)
    if model.sequences:
        steps = tuple(in_order(model, stream, options.batch) for stream in input_data.streams)
    else:
        steps = (alone(model, input_data.streams[0], options.batch),)
        if len(input_data.streams) > 1:
            notes.append(
                f"--input-data: of {len(input_data.streams)} streams the first is sent: the model has no sequences"
            )
    with _placed(model, options, control, steps) as (placed, outputs):
        writer = _writer(Call(model.name, model.version, outputs, options.parameters), model, options, target, headers)
        payloads: Payloads
        if model.sequences:
            payloads = Sequences(
                writer=writer,
                streams=placed,
                ids=ids(*options.sequence_ids, slots),
                lengths=_lengths(options, is_given=input_data.given),
                rows=options.batch,
                seed=options.seed,
            )
            for step in (step for stream in placed for step in stream):
                writer.template(step)  # report what cannot be written here, not in a process of the generator
        else:
            payloads = Repeated(tuple(writer.whole(step) for step in placed[0]), options.batch)
        yield Prepared(payloads, tuple(notes))


@contextmanager
def _placed(
    model: ModelDescription, options: Input, control: Registrar, steps: tuple[tuple[Step, ...], ...]
) -> Iterator[tuple[tuple[tuple[Step, ...], ...], tuple[RequestedOutput, ...]]]:
    if options.shared_memory == "none":
        yield steps, tuple(RequestedOutput(each.name) for each in model.outputs)
    elif options.shared_memory in ("system", "cuda"):
        create = system if options.shared_memory == "system" else cuda()
        with shared(control, model, steps, options.batch, options.output_shared_memory_bytes, create) as regions:
            yield regions
    else:
        raise InputError("--shared-memory: the choices are none, system and cuda")


def _writer(
    call: Call, model: ModelDescription, options: Input, target: Target, headers: Sequence[tuple[str, str]]
) -> Writer:
    if target.grpc is not None:
        return GrpcWriter(call, empty_final=target.grpc.streaming and model.decoupled)
    return HttpWriter(call, target, tuple(headers), options.binary_input, options.binary_output)


def _lengths(options: Input, *, is_given: bool) -> Lengths:
    length = options.sequence_length
    if length is not None and length < 1:
        raise InputError(f"--sequence-length {length}: a sequence has one request at least")
    if length is None and not is_given:
        length = SEQUENCE_LENGTH
    return Lengths(length, options.sequence_variation)
