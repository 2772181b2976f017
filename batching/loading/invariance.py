"""Invariance: whether the bytes of a row's answer depend on the other rows of its batch, found by running the model.

Kernels are chosen by shape, so rows change with the number of rows; at one fixed number, most models give a row the
same bytes at any position and with any neighbors. `settle` finds such a number for a policy that asks for it (called by
opening.py); `probe` also reports what holds without one (`penstock check --invariance`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.backends.backend import Backend, Binding
from penstock.backends.signature import Signature
from penstock.batching.scheduling.costs import NEAR_BEST
from penstock.batching.shapes.derived import derived_names
from penstock.batching.spec import ModelSpec

from . import drawn
from .drawn import KINDS, SPANS, Inputs, company, draw

logger = logging.getLogger("penstock.batching")

BUDGET_NS = 1_000_000_000
SIZES = (2, 4, 8, 16, 32)
"""The sizes to try, in addition to the largest."""
REQUIRED = 8
"""Trials that a size must pass; as many more follow as its share of the time allows."""
PATIENCE_NS = 4_000_000_000
"""What the required trials of one size may take: the model's load waits for them."""
Answers = list[tuple[bytes, ...]]
"""Per row, the bytes of each output."""


@dataclass(slots=True)
class Probed:
    """What was found for one model.

    Units: rows. `fixed`: the sizes at which a row's bytes depend on nothing but the row, with the ns of a run.
    `natural`: the sizes, of those `tried`, at which rows have the same bytes as alone. `reason`: why nothing was
    probed.
    """

    fixed: dict[int, int]
    natural: tuple[int, ...] = ()
    tried: tuple[int, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        """Describe it in one line."""
        if self.reason:
            return f"not probed: {self.reason}"
        if not self.natural:
            itself = "not invariant"
        elif self.natural == self.tried:
            itself = f"invariant in all batches tried: {_listed(self.natural)}"
        else:
            itself = f"invariant only in batches of {_listed(self.natural)}"
        if not self.fixed:
            return f"{itself}, and at no fixed size tried: with strict invariance, each request would run alone"
        return f"{itself}; invariant at a fixed size of {_listed(tuple(sorted(self.fixed)))}"


def settle(spec: ModelSpec, backends: Sequence[Backend]) -> ModelSpec:
    """Complete a policy that requires invariance with the size at which every batch is to run.

    If no size holds, each request runs alone, unpadded. A request of more rows than the size runs in parts.
    """
    policy, signature = spec.policy, spec.signature
    if not policy.invariant or signature is None or not signature.batched:
        return spec
    start_ns = time.monotonic_ns()
    fixed: dict[int, int] | None = None
    reason = ""
    for backend in backends:
        found = probe(spec, backend, natural=False)
        reason = reason or found.reason
        fixed = found.fixed if fixed is None else {size: ns for size, ns in fixed.items() if size in found.fixed}
    took_ms = (time.monotonic_ns() - start_ns) // 1_000_000
    if not fixed:
        why = reason or "no batch size was found in time at which answers do not depend on other requests"
        logger.info("model %s: each request runs alone: %s (probed in %d ms)", spec.name, why, took_ms)
        return replace(spec, policy=replace(policy, cap_rows=1, preferred_rows=(), max_queue_delay_us=0))
    size = _best(fixed)
    text = "model %s: every batch runs at %d rows, where answers do not depend on its other requests (probed in %d ms)"
    logger.info(text, spec.name, size, took_ms)
    settled = replace(policy, max_batch_rows=size, cap_rows=size, allowed_rows=(size,), preferred_rows=(), split=True)
    return replace(spec, policy=settled)


def _best(fixed: dict[int, int]) -> int:
    """Choose the smallest size whose time per row is near the best, as the CostModel does."""
    best = min(ns / size for size, ns in fixed.items())
    return min(size for size, ns in fixed.items() if ns / size <= best * NEAR_BEST)


def probe(spec: ModelSpec, backend: Backend, *, natural: bool = True) -> Probed:
    """Run a model on drawn rows, at different positions and with different neighbors, for about BUDGET_NS.

    `natural`: also compare batches of every size with rows that run alone. Never raises; the result for a model that
    cannot run on drawn rows has a reason.
    """
    signature, most = spec.binding_signature or spec.signature, spec.policy.max_batch_rows or 1
    most = min(most, spec.policy.cap_rows or most)
    reason = _obstacle(spec, signature) if most > 1 else "no two rows share a batch"
    if reason or signature is None:
        return Probed({}, reason=reason)
    binding = backend.bind(signature, most)
    for span in SPANS:
        rows = draw(signature, most, span)
        try:
            _run(signature, binding, [array[:2] for array in rows])
        except Exception as error:  # noqa: BLE001 - drawn numbers may not be valid indices
            reason = f"it does not run on random rows: {error}"
            continue
        run = _Run(signature, binding, span)
        sizes = [size for size in spec.policy.allowed_rows or (*SIZES, most) if 1 < size <= most]
        found = Probed(_fixed(run, rows, sorted(set(sizes))))
        if natural:
            with contextlib.suppress(Exception):  # a size that it cannot run
                found.tried, found.natural = _natural(run, rows, most)
        return found
    return Probed({}, reason=reason)


def _obstacle(spec: ModelSpec, signature: Signature | None) -> str:
    if signature is None or not signature.batched:
        return "it has no batch axis, so requests never share a batch"
    if derived_names(spec) or any(each.ragged or each.is_shape for each in (*signature.inputs, *signature.outputs)):
        return "it has inputs that describe the batch, ragged tensors, or values that rows share"
    for each in signature.inputs:
        if each.datatype == "BYTES":
            return f"input '{each.name}' is BYTES, for which no random values can be generated"
        if -1 in each.shape[1:]:
            return f"input '{each.name}' has a free axis, and a result for one length does not hold for another"
    return ""


class _Run:
    """Runs a model and returns the bytes of each row."""

    def __init__(self, signature: Signature, binding: Binding, span: int) -> None:
        self.signature = signature
        self.span = span
        self._binding = binding

    def __call__(self, rows: Inputs) -> Answers:
        return _run(self.signature, self._binding, rows)


def _run(signature: Signature, binding: Binding, rows: Inputs) -> Answers:
    outputs = drawn.run(binding, rows, tuple(range(len(signature.outputs))))
    if any(len(output) != len(rows[0]) for output in outputs):
        raise ValueError("its outputs do not have as many rows as its inputs")
    return list(zip(*[map(_bytes, output) for output in outputs], strict=True))


def _bytes(row: Any) -> bytes:
    numeric = isinstance(row, np.ndarray | np.generic) and not row.dtype.hasobject
    return row.tobytes() if numeric else repr(row).encode()


def _fixed(run: _Run, rows: Inputs, sizes: Sequence[int]) -> dict[int, int]:
    """Find the sizes that hold, in ascending order; time that small ones leave goes to the larger."""
    end_ns = time.monotonic_ns() + BUDGET_NS
    held = {}
    for left, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
        now_ns = time.monotonic_ns()
        if now_ns > end_ns:
            break
        ns = _holds(run, [array[:size] for array in rows], now_ns + (end_ns - now_ns) // left)
        if ns:
            held[size] = ns
    return held


def _holds(run: _Run, rows: Inputs, deadline_ns: int) -> int:
    """Return the ns of the fastest run if rows keep their bytes at all positions and neighbors tried, else 0."""
    start_ns = time.monotonic_ns()
    try:
        answers = run(rows)
    except Exception:  # noqa: BLE001 - it cannot run this size
        return 0
    best_ns = time.monotonic_ns() - start_ns
    if best_ns * REQUIRED > PATIENCE_NS:
        return 0
    passed = 0
    for trial, origin in _trials(rows, run.span, run.signature):
        start_ns = time.monotonic_ns()
        if passed >= REQUIRED and start_ns > deadline_ns:
            break
        try:
            found = run(trial)
        except Exception:  # noqa: BLE001, S112 - an error caused by a neighbor changes no bytes
            continue
        best_ns = min(best_ns, time.monotonic_ns() - start_ns)
        if any(found[place] != answers[row] for place, row in origin):
            return 0
        passed += 1
    return best_ns if passed >= REQUIRED else 0


def _trials(rows: Inputs, span: int, signature: Signature) -> Iterator[tuple[Inputs, list[tuple[int, int]]]]:
    """Yield batches of known rows moved or among other neighbors, with the position and the number of each known row.

    The most revealing ones come first.
    """
    size = len(rows[0])
    halves = [range(0, size, 2), range(1, size, 2)]
    turns = list(dict.fromkeys((0, 1, size // 2, size - 1, *range(size))))
    for turn in turns[:4]:
        yield _turned(rows, turn)
    for number in range(2):
        for at, kind in enumerate(KINDS):
            kept = halves[(at + number) % 2]
            others = [company(spec, array, kind, span) for spec, array in zip(signature.inputs, rows, strict=True)]
            for array, known in zip(others, rows, strict=True):
                array[kept] = known[kept]
            yield others, [(place, place) for place in kept]
    for turn in turns[4:]:
        yield _turned(rows, turn)


def _turned(rows: Inputs, turn: int) -> tuple[Inputs, list[tuple[int, int]]]:
    size = len(rows[0])
    return [np.roll(array, turn, axis=0) for array in rows], [((row + turn) % size, row) for row in range(size)]


def _natural(run: _Run, rows: Inputs, most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Compare batches of different sizes with their rows alone. Returns: the sizes tried, and those that held."""
    end_ns = time.monotonic_ns() + BUDGET_NS
    alone: Answers = []
    while len(alone) < most and (len(alone) < SIZES[-1] // 2 or time.monotonic_ns() < end_ns):
        alone += run([array[len(alone) : len(alone) + 1] for array in rows])
    end_ns = time.monotonic_ns() + BUDGET_NS
    held: dict[int, bool] = {}
    for size in dict.fromkeys((*SIZES, *range(2, most + 1))):
        if size <= most and (not held or time.monotonic_ns() < end_ns):
            answers = run([array[:size] for array in rows])
            held[size] = all(one == other for one, other in zip(answers, alone, strict=False))
    return tuple(sorted(held)), tuple(sorted(size for size, same in held.items() if same))


def _listed(sizes: Sequence[int]) -> str:
    if len(sizes) > 2 and list(sizes) == list(range(sizes[0], sizes[-1] + 1)):
        return f"{sizes[0]} to {sizes[-1]} rows"
    return f"{', '.join(map(str, sizes))} rows"
