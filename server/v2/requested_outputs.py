"""Requested outputs: which outputs a call requests, the model's and those that only its hooks return, and gets.

`parse_outputs` parses them before the run, for both transports. Requests of Python models to other models follow the
same rule, and get only the outputs they name. Texts are Triton's.
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
    invalid,
    parse_flag,
    parse_location,
    parse_unsigned,
    prefix_with_id,
    require_regions,
)
from .finish import modes_of
from .regions import Lease

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest

    from .call_parameters import OutputMode, Plan
    from .regions import Regions


def parse_outputs(
    model: Model, entries: Iterable[tuple[str, Mapping[str, Any] | None]], regions: Regions | None, *,
    hooks: bool = False,
) -> tuple[tuple[int, ...], Plan]:  # fmt: skip
    """Parse the requested outputs, each with its parameters. Returns: their positions, and how they are returned.

    `hooks`: the request passes through the model's hooks, if it has any.
    Raises: InferError (INVALID, NOT_FOUND, UNSUPPORTED).
    """
    modes: dict[str, OutputMode] = {}
    hook_outputs: dict[str, OutputMode] = {}
    for name, items in entries:
        is_hook = is_hook_output(model, name, hooks=hooks)
        if is_hook and items and "shared_memory_region" in items:
            raise unexpected_output(model, name)
        if name in modes or name in hook_outputs:
            raise invalid(f"Duplicate output name '{name}' is not allowed in a request")
        (hook_outputs if is_hook else modes)[name] = _parse_mode(items, name, regions) if items else JSON
    specs, specs_by_name = model.signature.outputs, model.signature.output
    wanted, chosen = tuple([specs.index(specs_by_name[name]) for name in modes]), tuple(modes.values())
    if hook_outputs or any(type(mode) is not bool for mode in chosen):
        return wanted, PerOutputPlan(
            chosen, not hook_outputs and all(type(mode) is Lease for mode in chosen), hook_outputs
        )
    return wanted, chosen if any(chosen) else None  # type: ignore[return-value]


def is_hook_output(model: Model, name: str, *, hooks: bool = True) -> bool:
    """Return whether a requested output is one that only post_inference can return.

    `hooks`: the request passes through the model's hooks, if it has any. Raises: InferError (INVALID, UNSUPPORTED) if
    nothing can return it.
    """
    spec = model.signature.output.get(name)
    if spec is not None and spec.is_tensor:
        return False
    if not (hooks and model.hooks_name_outputs):
        raise unexpected_output(model, name)
    return True


def unexpected_output(model: Model, name: str) -> InferError:
    """Return the error for an output that does not exist, or not as a tensor."""
    spec = model.signature.output.get(name)
    if spec is not None:
        advice = f". It is {spec.advice}" if spec.advice else ""
        text = f"output '{name}' of model '{model.name}' is not a tensor, only hooks receive it{advice}"
        return InferError(Code.UNSUPPORTED, text)
    return invalid(f"unexpected inference output '{name}' for model '{model.name}'")


def _parse_mode(items: Mapping[str, Any], name: str, regions: Regions | None) -> OutputMode:
    binary = parse_flag(items, "binary_data", default=JSON)
    if "shared_memory_region" in items:
        if "classification" in items:
            raise invalid("Output can't set both 'shared_memory_region' and 'classification'")
        if binary:
            raise invalid("Output can't set both 'shared_memory_region' and 'binary_data'")
        region, offset, byte_size = parse_location(items)
        return require_regions(regions).lease(region, offset, byte_size)
    count = parse_unsigned(items, "classification", "set")
    if count > MAX_CLASSES:
        raise invalid(f"classification of output '{name}' requests {count} classes, the maximum is {MAX_CLASSES}")
    return Classes(count, binary) if count else binary


def require_hook_outputs(model: Model, hook_outputs: Iterable[str], outputs: Mapping[str, Array]) -> None:
    """Reject the single answer of hooks if it lacks an output that only they can return, and count it as failed.

    Threads: the event loop's. Raises: InferError (INVALID, UNSUPPORTED).
    """
    missing = [name for name in hook_outputs if name not in outputs]
    if missing and not model.spec.decoupled:
        now_ns = time.monotonic_ns()
        model.statistics.record_failure(OTHER, now_ns, now_ns)
        raise unexpected_output(model, missing[0])


def select_outputs(request: InferRequest, plan: Plan, outputs: Mapping[str, Array]) -> dict[str, OutputMode]:
    """Return which of the outputs that hooks returned are sent, each with its way: those requested, or all.

    All are also sent if only the model's outputs are requested and none of them is present. If there are several
    answers, each may lack some.
    Raises: as `require_hook_outputs`. Threads: the event loop's.
    """
    model = request.model
    hook_outputs = plan.hook_outputs if isinstance(plan, PerOutputPlan) else {}
    try:
        require_hook_outputs(model, hook_outputs, outputs)
    except InferError as error:
        raise prefix_with_id(request.id, error) from None
    modes = modes_of(plan, len(request.output_positions))
    # without named outputs, the positions are the model's own tuple; an equal one names each output, unless it is empty
    if hook_outputs or request.output_positions is not model.all_outputs:
        names = [model.signature.outputs[position].name for position in request.output_positions]
        requested = {**dict(zip(names, modes, strict=True)), **hook_outputs}
        selected = {name: requested[name] for name in outputs if name in requested}
        if selected or hook_outputs:
            return selected
    return dict.fromkeys(outputs, BINARY if plan is not None and all(mode is BINARY for mode in modes) else JSON)
