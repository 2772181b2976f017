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

    `converters` convert a result, indexed by packing.INPUTS, JSON and TENSORS.
    """

    functions: Mapping[str, HookFunction | None]
    conversions: Conversions
    converters: tuple[Converter, Converter, Converter]

    def dialect_error(self, hook: str, error: BaseException) -> InferError | None:
        """Return the dialect's error for an exception of user code; None for the default one."""
        try:
            return self.conversions.error_for(hook, error)
        except Exception:  # noqa: BLE001 - __str__ is user code
            return None


def bind(module: HookModule, conversions: Conversions, signature: Signature, metadata: Any) -> BoundHooks:
    """Bind each hook to its constant arguments; tensors of an infer answer are made the same way in all dialects."""
    converters = conversions.to_inputs, conversions.encode_answer, lambda result, _: to_tensors(result, signature)
    return BoundHooks(module.bind_all(*conversions.signatures, metadata), conversions, converters)
