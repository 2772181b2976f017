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
from .input_data import streams
from .repeated import Repeated
from .sequences import Lengths, Sequences, ids
from .shared_memory import Registrar, shared, system
from .tensors import InputError, Step
from .writing import Call, Wanted, Writer, check_parameters

__all__ = ["InputError", "Prepared", "prepared"]

SEQUENCE_LENGTH = 20
"""The default length of sequences of generated data."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is sent, and notes for readers of the report, one line each."""

    payloads: Payloads
    notes: tuple[str, ...] = ()


@contextmanager
def prepared(
    model: ModelDescription,
    asked: Input,
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
    check_batch(model, asked.batch)
    check_parameters(asked.parameters)
    found = streams(model, asked)
    notes = list(found.notes)
    if model.sequences:
        steps = tuple(in_order(model, stream, asked.batch) for stream in found.streams)
    else:
        steps = (alone(model, found.streams[0], asked.batch),)
        if len(found.streams) > 1:
            notes.append(f"--input-data: of {len(found.streams)} streams the first is sent: the model has no sequences")
    with _placed(model, asked, control, steps) as (placed, wanted):
        writer = _writer(Call(model.name, model.version, wanted, asked.parameters), model, asked, target, headers)
        payloads: Payloads
        if model.sequences:
            payloads = Sequences(
                writer=writer,
                streams=placed,
                ids=ids(*asked.sequence_ids, slots),
                lengths=_lengths(asked, given=found.given),
                rows=asked.batch,
                seed=asked.seed,
            )
            for step in (step for stream in placed for step in stream):
                writer.template(step)  # report what cannot be written here, not in a process of the generator
        else:
            payloads = Repeated(tuple(writer.whole(step) for step in placed[0]), asked.batch)
        yield Prepared(payloads, tuple(notes))


@contextmanager
def _placed(
    model: ModelDescription, asked: Input, control: Registrar, steps: tuple[tuple[Step, ...], ...]
) -> Iterator[tuple[tuple[tuple[Step, ...], ...], tuple[Wanted, ...]]]:
    if asked.shared_memory == "none":
        yield steps, tuple(Wanted(each.name) for each in model.outputs)
    elif asked.shared_memory in ("system", "cuda"):
        create = system if asked.shared_memory == "system" else cuda()
        with shared(control, model, steps, asked.batch, asked.output_shared_memory_bytes, create) as found:
            yield found
    else:
        raise InputError("--shared-memory: the choices are none, system and cuda")


def _writer(
    call: Call, model: ModelDescription, asked: Input, target: Target, headers: Sequence[tuple[str, str]]
) -> Writer:
    if target.grpc is not None:
        return GrpcWriter(call, empty_final=target.grpc.streaming and model.decoupled)
    return HttpWriter(call, target, tuple(headers), asked.binary_input, asked.binary_output)


def _lengths(asked: Input, *, given: bool) -> Lengths:
    length = asked.sequence_length
    if length is not None and length < 1:
        raise InputError(f"--sequence-length {length}: a sequence has one request at least")
    if length is None and not given:
        length = SEQUENCE_LENGTH
    return Lengths(length, asked.sequence_variation)
