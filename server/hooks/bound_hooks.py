"""BoundHooks: what the calls of one instance of a hook file run with. Made in the process where that is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.backends.errors import InferError
from penstock.backends.signature import Signature

from .conversions import Conversions
from .convert import to_tensors
from .loading import HookFunction, HookModule

Maker = Callable[[Any, Mapping[str, Any]], Any]
"""Makes something of a value, by the rules of the model and with the request's parameters."""


class BoundHooks(NamedTuple):
    """The hooks with what stays the same on every call, and the rules that their values go by.

    `makers` give what is made of a result, by packing.INPUTS, JSON and TENSORS.
    """

    functions: Mapping[str, HookFunction | None]
    rules: Conversions
    makers: tuple[Maker, Maker, Maker]

    def words(self, hook: str, error: BaseException) -> InferError | None:
        """Give what the dialect says of what user code has raised; None: what ours says."""
        try:
            return self.rules.failure(hook, error)
        except Exception:  # noqa: BLE001 - the user's class, the user's __str__
            return None


def bind(module: HookModule, rules: Conversions, signature: Signature, metadata: Any) -> BoundHooks:
    """Give each hook the arguments that stay the same; tensors for an infer answer are alike in all dialects."""
    makers = rules.inputs, rules.answer, lambda result, _: to_tensors(result, signature)
    return BoundHooks(module.bound(*rules.signatures, metadata), rules, makers)
