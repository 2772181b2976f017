"""BoundHooks: what calls of one instance of a hook file need. Made in the process that loads the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.backends.errors import InferError
from penstock.backends.signature import Signature

from .conversions import Conversions
from .convert import to_tensors
from .loading import HookFunction, HookModule

Converter = Callable[[Any, Mapping[str, Any]], Any]
"""Converts a value by the rules of the model, given the request's parameters."""


class BoundHooks(NamedTuple):
    """The hooks with their constant arguments, and the rules for their values.

    `makers` convert a result, indexed by packing.INPUTS, JSON and TENSORS.
    """

    functions: Mapping[str, HookFunction | None]
    rules: Conversions
    makers: tuple[Converter, Converter, Converter]

    def words(self, hook: str, error: BaseException) -> InferError | None:
        """Return the dialect's error for an exception of user code; None for the default one."""
        try:
            return self.rules.failure(hook, error)
        except Exception:  # noqa: BLE001 - __str__ is user code
            return None


def bind(module: HookModule, rules: Conversions, signature: Signature, metadata: Any) -> BoundHooks:
    """Bind each hook to its constant arguments; tensors of an infer answer are made the same way in all dialects."""
    makers = rules.inputs, rules.answer, lambda result, _: to_tensors(result, signature)
    return BoundHooks(module.bound(*rules.signatures, metadata), rules, makers)
