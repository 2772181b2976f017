"""Wanted: which outputs a call requests, the model's and those that only its hooks return, and which it is sent.

`outputs` parses them before the run, for both transports. Requests of Python models to other models follow the same
rule, and get only the outputs they name. Texts are Triton's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.batching.statistics import OTHER

from .call_parameters import (
    BINARY,
    JSON,
    MAX_CLASSES,
    Classes,
    PerOutputPlan,
    flag,
    invalid,
    place,
    shared,
    unsigned,
    with_id,
)
from .finish import ways_of
from .regions import Lease

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest

    from .call_parameters import Plan, Way
    from .regions import Regions


def outputs(
    model: Model, entries: Iterable[tuple[str, Mapping[str, Any] | None]], regions: Regions | None, *,
    hooks: bool = False,
) -> tuple[tuple[int, ...], Plan]:  # fmt: skip
    """Parse the requested outputs, each with its parameters. Returns: their positions, and how they are returned.

    `hooks`: the request passes through the model's hooks, if it has any.
    Raises: InferError (INVALID, NOT_FOUND, UNSUPPORTED).
    """
    ways: dict[str, Way] = {}
    own: dict[str, Way] = {}
    for name, items in entries:
        by_hooks = is_own(model, name, hooks=hooks)
        if by_hooks and items and "shared_memory_region" in items:
            raise unexpected(model, name)
        if name in ways or name in own:
            raise invalid(f"Duplicate output name '{name}' is not allowed in a request")
        (own if by_hooks else ways)[name] = _way(items, name, regions) if items else JSON
    specs, known = model.signature.outputs, model.signature.output
    wanted, chosen = tuple([specs.index(known[name]) for name in ways]), tuple(ways.values())
    if own or any(type(way) is not bool for way in chosen):
        return wanted, PerOutputPlan(chosen, not own and all(type(way) is Lease for way in chosen), own)
    return wanted, chosen if any(chosen) else None  # type: ignore[return-value]


def is_own(model: Model, name: str, *, hooks: bool = True) -> bool:
    """Return whether a requested output is one that only post_inference can return.

    `hooks`: the request passes through the model's hooks, if it has any. Raises: InferError (INVALID, UNSUPPORTED) if
    nothing can return it.
    """
    spec = model.signature.output.get(name)
    if spec is not None and spec.is_tensor:
        return False
    if not (hooks and model.hooks_name_outputs):
        raise unexpected(model, name)
    return True


def unexpected(model: Model, name: str) -> InferError:
    """Return the error for an output that does not exist, or not as a tensor."""
    spec = model.signature.output.get(name)
    if spec is not None:
        advice = f". It is {spec.advice}" if spec.advice else ""
        text = f"output '{name}' of model '{model.name}' is no tensor; only hooks see it{advice}"
        return InferError(Code.UNSUPPORTED, text)
    return invalid(f"unexpected inference output '{name}' for model '{model.name}'")


def _way(items: Mapping[str, Any], name: str, regions: Regions | None) -> Way:
    binary = flag(items, "binary_data", default=JSON)
    if "shared_memory_region" in items:
        if "classification" in items:
            raise invalid("Output can't set both 'shared_memory_region' and 'classification'")
        if binary:
            raise invalid("Output can't set both 'shared_memory_region' and 'binary_data'")
        region, offset, byte_size = place(items)
        return shared(regions).lease(region, offset, byte_size)
    count = unsigned(items, "classification", "set")
    if count > MAX_CLASSES:
        raise invalid(f"classification of output '{name}' asks for {count} classes, the maximum is {MAX_CLASSES}")
    return Classes(count, binary) if count else binary


def demand(model: Model, own: Iterable[str], outputs: Mapping[str, Array]) -> None:
    """Reject the single answer of hooks if it lacks an output that only they can return, and count it as failed.

    Threads: the event loop's. Raises: InferError (INVALID, UNSUPPORTED).
    """
    lacking = [name for name in own if name not in outputs]
    if lacking and not model.spec.decoupled:
        now_ns = time.monotonic_ns()
        model.statistics.record_failure(OTHER, now_ns, now_ns)
        raise unexpected(model, lacking[0])


def told(request: InferRequest, plan: Plan, outputs: Mapping[str, Array]) -> dict[str, Way]:
    """Return which of the outputs that hooks returned are sent, each with its way: those requested, or all.

    All are also sent if only the model's outputs are requested and none of them is present. If there are several
    answers, each may lack some.
    Raises: as `demand`. Threads: the event loop's.
    """
    model = request.model
    own = plan.own if isinstance(plan, PerOutputPlan) else {}
    try:
        demand(model, own, outputs)
    except InferError as error:
        raise with_id(request.id, error) from None
    ways = ways_of(plan, len(request.output_positions))
    # without named outputs, `wanted` is the model's own tuple; an equal tuple names each output, unless it is empty
    if own or request.output_positions is not model.all_outputs:
        names = [model.signature.outputs[position].name for position in request.output_positions]
        asked = {**dict(zip(names, ways, strict=True)), **own}
        chosen = {name: asked[name] for name in outputs if name in asked}
        if chosen or own:
            return chosen
    return dict.fromkeys(outputs, BINARY if plan is not None and all(way is BINARY for way in ways) else JSON)
