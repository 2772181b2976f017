"""The memory budget of a model on a device: checked before a load begins, and measured afterwards.

Loads on one device run one after another, so that each measures only its own memory.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from .cuda import CudaError, Runtime, to_infer_error
from .errors import RETRY_AFTER_NS, Code, InferError

BUDGET_OPTION = "penstock.gpu_memory_bytes"
LIMIT_OPTION = "penstock.gpu_limit"
_MIB = 1 << 20

LOAD_LOCKS: Mapping[int, threading.Lock] = defaultdict(threading.Lock)
"""Held while loading on a device."""


@dataclass(frozen=True)
class Budget:
    """`budget_bytes`: the most memory for the model, 0: no limit. `limit`: the fraction in use that stops all loads."""

    device: int
    budget_bytes: int = 0
    limit: float = 1.0

    @classmethod
    def from_options(cls, device: int, options: Mapping[str, str]) -> Budget:
        """Parse a model's options. Raises: InferError (INVALID)."""
        text = options.get(BUDGET_OPTION, "0")
        if not (text.isascii() and text.isdecimal()):
            raise InferError(Code.INVALID, f"option '{BUDGET_OPTION}' must be a number of bytes, not '{text}'")
        return cls(device, int(text), _limit(options.get(LIMIT_OPTION, ""), device))

    def check_before(self, runtime: Runtime, weight_bytes: int) -> int:
        """Reject a load that cannot fit, before it has allocated anything. Returns: the free bytes.

        Raises: InferError (OVERLOADED).
        """
        try:
            free, total = runtime.memory_info(self.device)
        except CudaError as error:
            raise to_infer_error(error) from error
        needs = self.budget_bytes or weight_bytes
        what = "its memory budget is" if self.budget_bytes else "its weights take"
        if self.budget_bytes and weight_bytes > self.budget_bytes:
            text = f"its weights take {_mib(weight_bytes)}, more than {_mib(self.budget_bytes)}"
            raise InferError(Code.OVERLOADED, f"the model does not fit in its memory budget: {text}", -1)
        if needs > free:
            text = f"{what} {_mib(needs)}, but only {_mib(free)} of {_mib(total)} are free"
            advice = "unload another model, give this one fewer instances, or choose another GPU"
            raise InferError(
                Code.OVERLOADED, f"not enough memory on cuda:{self.device}: {text}; {advice}", RETRY_AFTER_NS
            )
        if total - free >= self.limit * total:
            used = f"{_mib(total - free)} of {_mib(total)} are in use"
            text = f"not enough memory on cuda:{self.device}: {used}, and the limit for loading is {self.limit:.0%}"
            raise InferError(Code.OVERLOADED, f"{text} (model-load-gpu-limit)", RETRY_AFTER_NS)
        return free

    def check_after(self, taken_bytes: int) -> None:
        """Reject a model that has exceeded its budget. Raises: InferError (OVERLOADED)."""
        if self.budget_bytes and taken_bytes > self.budget_bytes:
            text = f"the model takes {_mib(taken_bytes)} on cuda:{self.device}, but its memory budget is"
            raise InferError(Code.OVERLOADED, f"{text} {_mib(self.budget_bytes)}", -1)


def _limit(text: str, device: int) -> float:
    """Parse "0:0.8,2:0.5": device number and fraction."""
    for entry in text.split(",") if text else ():
        device_text, _, fraction_text = entry.partition(":")
        try:
            listed_device, fraction = int(device_text), float(fraction_text)
        except ValueError:
            raise InferError(Code.INVALID, f"option '{LIMIT_OPTION}' must look like '0:0.8', not '{text}'") from None
        if listed_device == device:
            return fraction
    return 1.0


def _mib(count: int) -> str:
    return f"{count / _MIB:.0f} MiB" if count >= _MIB else f"{count} bytes"
