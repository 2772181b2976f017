"""Run sizes: the few numbers of rows with which a model runs on a GPU, where nobody has said which.

There a number of rows that has not run before is dear: kernels are chosen, and plans of convolutions built, for each
shape, 0.2 s for a ResNet-50 (docs/gpu-check.md). So a model has few sizes, and runs all of them before it is ready, as
CUDA graphs where it can. Its batches are filled up to the next one, or cut to the last one where that serves more
(sizing.py). Called by opening.py and, for what is recorded or built by size, by the Repository.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.batching.shapes.bound import laid_flat

if TYPE_CHECKING:
    from penstock.batching.spec import ModelSpec

SIZES = "penstock.rows"
"""The option of a Loader that says the sizes in which a model is run, "1,2,4,8"."""


def run_sizes(most: int) -> tuple[int, ...]:
    """Give 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on up to `most`: two to a doubling, to fill up a third at most."""
    steps = (rows for power in range(1, most.bit_length() + 1) for rows in (1 << power, 3 << power - 1))
    return (*sorted({size for size in (1, *steps) if size < most}), most)


def said_sizes(spec: ModelSpec) -> tuple[int, ...]:
    """Give the sizes that its options say, if they do."""
    return tuple(map(int, filter(None, spec.options.get(SIZES, "").split(","))))


def with_run_sizes(spec: ModelSpec) -> ModelSpec:
    """Give a completed spec the sizes that its batches run with, if it has any device that wants few of them.

    Its options say which (`SIZES`), or else they are `run_sizes`, with those of the batches that its policy asks for. A
    policy that says its own sizes stands. A model has none whose batches are more than rows one after another, nor one
    that is to be invariant: the one size of all its batches is found by running it (invariance.py).
    """
    policy, signature, most = spec.policy, spec.signature, spec.policy.max_batch_rows or 0
    if most < 2 or policy.allowed_rows or all(set(group.devices) <= {"cpu"} for group in spec.instances):
        return spec
    if policy.invariant or spec.sequence is not None or signature is None or any(laid_flat(spec, signature).values()):
        return spec
    wanted = {*(said_sizes(spec) or run_sizes(most)), *policy.preferred_rows, policy.cap_rows or most, most}
    sizes = sorted(size for size in wanted if 1 <= size <= most)
    return replace(spec, policy=replace(policy, allowed_rows=tuple(sizes)))
