"""Run sizes: the few batch sizes with which a model runs, if none are configured, where a new one is expensive.

On a GPU, kernels are chosen, and convolution plans built, for each shape, 0.2 s for a ResNet-50 (docs/gpu-check.md).
So a model has few sizes, and runs all of them before it is ready, as CUDA graphs if possible. A model that XLA compiles
has few on any device: a compilation takes at least 0.2 s. Its batches are padded to the next size, or cut to the last
one if that serves more (sizing.py). Called by opening.py and, for what is recorded or built by size, by the Repository.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.batching.shapes.bound import flattening_fields

if TYPE_CHECKING:
    from penstock.batching.spec import ModelSpec

SIZES_OPTION = "penstock.rows"
"""The Loader option that lists the sizes in which a model is run, "1,2,4,8"."""


def run_sizes(max_rows: int) -> tuple[int, ...]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, 24 ... up to `max_rows`: two per doubling, at most a third of it padding."""
    steps = (rows for power in range(1, max_rows.bit_length() + 1) for rows in (1 << power, 3 << power - 1))
    return (*sorted({size for size in (1, *steps) if size < max_rows}), max_rows)


def configured_sizes(spec: ModelSpec) -> tuple[int, ...]:
    """Return the sizes listed in its options, if any."""
    return tuple(map(int, filter(None, spec.options.get(SIZES_OPTION, "").split(","))))


def with_run_sizes(spec: ModelSpec, *, compiled: bool = False) -> ModelSpec:
    """Set the batch sizes of a completed spec, if it has any device that needs few of them, or each is `compiled`.

    They come from its options (`SIZES_OPTION`) or else from `run_sizes`, plus the sizes that its policy asks for. A
    policy with its own sizes is unchanged. So are models whose batches are more than rows, and models that must be
    invariant: the one size of all their batches is found by running them (invariance.py).
    """
    policy, signature, max_rows = spec.policy, spec.signature, spec.policy.max_batch_rows or 0
    only_cpu = all(set(group.devices) <= {"cpu"} for group in spec.instances)
    if max_rows < 2 or policy.allowed_rows or (only_cpu and not compiled):
        return spec
    if (
        policy.invariant
        or spec.sequence is not None
        or signature is None
        or any(flattening_fields(spec, signature).values())
    ):
        return spec
    candidates = {
        *(configured_sizes(spec) or run_sizes(max_rows)),
        *policy.preferred_rows,
        policy.cap_rows or max_rows,
        max_rows,
    }
    sizes = sorted(size for size in candidates if 1 <= size <= max_rows)
    return replace(spec, policy=replace(policy, allowed_rows=tuple(sizes)))
