"""What a call says besides its tensors: its parameters, and how each requested output is to be returned.

The rules are the same over HTTP and gRPC, whose decoding calls this: `parameters` takes plain Python values, from
either. `requested_outputs.py` reads the outputs, `finish.py` carries out the Plan. Texts are Triton's.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InSequence, RequestOptions
from penstock.batching.scheduling.timeouts import queue_deadline_ns

from .regions import DISABLED_TEXT, Lease

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from penstock.batching.request import InferRequest
    from penstock.batching.spec import BatchPolicy

    from .regions import Regions

JSON, BINARY = False, True
RESERVED = (
    "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output",
)  # fmt: skip
"""Keys that are not allowed for custom parameters and forwarded headers."""
RESERVED_PREFIX = "triton_"
NO_ID = "Unable to parse 'id': attempt to access JSON non-string as string"
NOT_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
MAX_CLASSES = 1_000_000
MAX_ID_BYTES = 128
"""The longest sequence id that is a string."""
EMPTY_FINAL = "triton_enable_empty_final_response"
TARGET = "latency_target_ms"
_KNOWN_KEYS = frozenset((*RESERVED, "hooks", TARGET))
_MAX_TARGET_MS = 86_400_000
_MAX_TIMEOUT_US = 1 << 53
_MAX_UNSIGNED = (1 << 64) - 1
_MAX_VERSION = (1 << 63) - 1
_NEGATIVE = re.compile("-0*[1-9][0-9]{0,17}")
"""A negative version that Triton's stol can parse."""
_TYPES = (str, int, float, bool)
_PREFIX_TEXT = "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."


def parse_version(text: str) -> str:
    """Parse a version as Triton's stol does: "" means none, leading zeros are ignored.

    Raises: InferError (INVALID). Source of the texts: GetModelVersionFromString in Triton's src/common.cc.
    """
    if not text:
        return ""
    if _NEGATIVE.fullmatch(text):
        reason = f"invalid model version specified '{text}' "
        raise InferError(Code.INVALID, f"{reason}, version should be an integral value > 0")
    digits = text.lstrip("0") or "0"
    if not (text.isascii() and text.isdigit()) or len(digits) > len(str(_MAX_VERSION)) or int(digits) > _MAX_VERSION:
        reason = f"failed to get model version from specified version string '{text[:64]}' (details: stol)"
        raise InferError(Code.INVALID, f"{reason}, version should be an integral value > 0")
    return digits


@dataclass(frozen=True, slots=True)
class Classes:
    """An output requested as its `count` highest values with their indices and labels."""

    count: int
    binary: bool


OutputMode = bool | Classes | Lease
"""How one output is returned: JSON, BINARY (gRPC has only this), as Classes, or in the shared memory of a Lease."""


@dataclass(slots=True)
class PerOutputPlan:
    """How the requested outputs are returned, if at least one is neither JSON nor BINARY. It owns its leases.

    `all_shared`: all of them go into shared memory, as far as its maker knows. `hook_outputs` are outputs with names
    unknown to the model, which hooks may return.
    """

    modes: tuple[OutputMode, ...]
    all_shared: bool = False
    hook_outputs: Mapping[str, OutputMode] = field(default_factory=dict)

    def release(self) -> None:
        """Release the shared memory."""
        for mode in self.modes:
            if type(mode) is Lease:
                mode.release()


Plan = tuple[bool, ...] | PerOutputPlan | None
"""How each requested output is returned; None if all are returned as JSON."""


@dataclass(slots=True)
class Options:
    """What a call says besides its tensors. Immutable, because requests remembered as alike share one.

    Units: `timeout_us` is the limit in the queue, 0 if unset; `target_us` the time to the answer, likewise.
    `parameters` are custom parameters and forwarded headers, None if there are none; hooks and user-code models read
    them. `priority` and `sequence` are as in InferRequest. `empty_final`: if no answer was marked as the last, an empty
    one follows that is. `affects_request`: something is set that affects when or in which order the request is served,
    or that goes to the model.
    """

    plan: Plan = None
    timeout_us: int = 0
    hooks: bool = True
    parameters: Mapping[str, Any] | None = None
    target_us: int = 0
    priority: int = 0
    sequence: InSequence | None = None
    empty_final: bool = False
    affects_request: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.affects_request = bool(
            self.timeout_us or self.target_us or self.priority or self.parameters or self.sequence is not None
        )

    def with_plan(self, plan: Plan) -> Options:
        """Return the same options with another plan for the outputs."""
        return Options(
            plan, self.timeout_us, self.hooks, self.parameters, self.target_us, self.priority, self.sequence,
            self.empty_final,
        )  # fmt: skip

    def terms(self, now_ns: int, policy: BatchPolicy) -> RequestOptions:
        """Return the queueing terms of a request that passes hooks: its target can only be applied to the queue."""
        deadline_ns = queue_deadline_ns(now_ns, self.timeout_us, policy, self.target_us, self.priority)
        return RequestOptions(deadline_ns, self.priority, self.sequence, None, self.timeout_us)

    def apply_to(self, request: InferRequest) -> None:
        """Apply the options to a request. To be called if `affects_request`, or if its model has a default timeout."""
        now_ns = time.monotonic_ns()
        request.deadline_ns = queue_deadline_ns(now_ns, self.timeout_us, request.model.spec.policy, 0, self.priority)
        if self.target_us:
            target_ns = now_ns + self.target_us * 1000
            request.target_ns = min(target_ns, request.target_ns) if request.target_ns else target_ns
        request.priority, request.sequence = self.priority, self.sequence
        if self.timeout_us:
            request.timeout_us = self.timeout_us
        if self.parameters:
            request.parameters = self.parameters


DEFAULT_OPTIONS = Options()


def invalid(text: str) -> InferError:
    """Return the error for a request that is invalid by itself."""
    return InferError(Code.INVALID, text)


def prefix_with_id(request_id: str, error: InferError) -> InferError:
    """Prefix an error with the request id, as Triton does for requests that it could parse."""
    if error.code is Code.INVALID and not error.message.startswith("Unable to parse"):
        return invalid(f"[request id: {request_id or '<id_unknown>'}] {error.message}")
    return error


def parse_parameters(items: Mapping[str, Any], allowed: Collection[str] = ()) -> tuple[Options, bool]:
    """Parse a request's parameters; `allowed` are Triton keys that the transport accepts.

    Returns: the options without a plan, and whether outputs that are not named are returned as binary data.

    `priority` and the sequence members matter only to models with priority levels and to sequence models; others ignore
    them, as in Triton.
    Raises: InferError (INVALID).
    """
    if len(items) == 1 and items.get("binary_data_output") is True:
        # the only parameter of most Triton clients
        return DEFAULT_OPTIONS, True
    custom: dict[str, Any] | None = None
    for key, value in items.items():
        if type(value) not in _TYPES:
            check_type(key, value)
        if key not in _KNOWN_KEYS:
            if key in allowed:
                continue
            check_key(key)
            if custom is None:
                custom = {}
            custom[key] = value
    if "headers" in items:
        check_key("headers")
    sequence = _parse_sequence(items)
    timeout_us, priority = parse_unsigned(items, "timeout"), parse_unsigned(items, "priority")
    binary = parse_flag(items, "binary_data_output", default=False)
    options = Options(
        None,
        min(timeout_us, _MAX_TIMEOUT_US),
        parse_flag(items, "hooks", default=True),
        custom,
        _parse_target_us(items[TARGET]) if TARGET in items else 0,
        priority,
        sequence,
        items.get(EMPTY_FINAL) is True,
    )
    return options, binary


def _parse_target_us(value: Any) -> int:
    if type(value) not in (int, float) or not 0 < value <= _MAX_TARGET_MS:
        raise invalid(f"Unable to parse '{TARGET}': expected a number above 0, at most {_MAX_TARGET_MS}")
    micros: int = max(1, round(value * 1000))
    return micros


def check_type(key: str, value: Any) -> None:
    """Check the type of a parameter. Raises: InferError (INVALID)."""
    if type(value) not in _TYPES:
        text = f"parameter '{key}' has invalid type. It should be either 'int', 'bool', 'string' or 'double'."
        raise invalid(text)


def check_key(key: str) -> None:
    """Check the key of a custom parameter or a forwarded header. Raises: InferError (INVALID)."""
    if key.startswith(RESERVED_PREFIX):
        raise invalid(_PREFIX_TEXT)
    if key in RESERVED:
        raise invalid(f"parameter '{key}' is reserved for Triton usage and should not be specified.")


def parse_flag(items: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """Read a boolean. Raises: InferError (INVALID)."""
    value = items.get(key, default)
    if type(value) is not bool:
        raise invalid(f"Unable to parse '{key}': attempt to access JSON non-boolean as boolean")
    return value


def is_unsigned(value: Any) -> TypeGuard[int]:
    """Return whether the value is an integer that fits in 64 unsigned bits."""
    return type(value) is int and 0 <= value <= _MAX_UNSIGNED


def parse_unsigned(items: Mapping[str, Any], key: str, verb: str = "parse") -> int:
    """Read an unsigned integer, 0 if unset. Raises: InferError (INVALID)."""
    value = items.get(key, 0)
    if not is_unsigned(value):
        raise invalid(f"Unable to {verb} '{key}': {NOT_UNSIGNED}")
    return value


def _parse_sequence(items: Mapping[str, Any]) -> InSequence | None:
    start, end = parse_flag(items, "sequence_start", default=False), parse_flag(items, "sequence_end", default=False)
    identity = items.get("sequence_id", 0)
    if type(identity) not in (int, str):
        raise invalid("Unable to parse 'sequence_id': attempt to access JSON non-string as string")
    if type(identity) is int:
        parse_unsigned(items, "sequence_id")
    if type(identity) is str and len(identity.encode("utf-8", "replace")) > MAX_ID_BYTES:
        raise invalid(f"string correlation ID cannot be longer than {MAX_ID_BYTES} characters")
    return InSequence(identity, start, end) if identity or start or end else None


def require_regions(regions: Regions | None) -> Regions:
    """Return the regions if the server has them. Raises: InferError (UNSUPPORTED)."""
    if regions is None:
        raise InferError(Code.UNSUPPORTED, DISABLED_TEXT)
    return regions


def parse_location(items: Mapping[str, Any]) -> tuple[str, int, int]:
    """Read a tensor's location from its parameters: the region's name, and the offset and size within it.

    Raises: InferError (INVALID).
    """
    region = items.get("shared_memory_region")
    if type(region) is not str:
        raise invalid("Unable to parse 'shared_memory_region': attempt to access JSON non-string as string")
    return region, parse_unsigned(items, "shared_memory_offset"), parse_unsigned(items, "shared_memory_byte_size")
