"""WrappedModel: the target of an entry point, and its methods. Source: deepaas 2.6.0, model/v2/wrapper.py.

Every method is optional. A class is instantiated, without arguments, unless all its methods work without an instance;
the original never did, contrary to its documentation.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from .answers import Refusal, json_answer, log, text_answer

METHODS = ("get_metadata", "get_predict_args", "predict", "get_train_args", "train", "warm")


class WrappedModel:
    """One model. `model` is a module or an object."""

    def __init__(self, name: str, target: str) -> None:
        self.name = name
        self.model = _import_target(target)
        self.schema = getattr(self.model, "schema", None)

    def method(self, name: str) -> Callable[..., Any] | None:
        """Return a method, None if the model does not have it."""
        method: Callable[..., Any] | None = getattr(self.model, name, None)
        is_abstract = isinstance(self.model, type) and getattr(method, "__isabstractmethod__", False)
        return None if is_abstract else method

    def require(self, name: str) -> Callable[..., Any]:
        """Return a method that is about to be called. Raises: Refusal (501) if there is none."""
        found = self.method(name)
        if found is None:
            raise Refusal(text_answer(501, f"Not implemented by underlying model (loaded '{self.name}')"))
        return found

    def arguments(self, name: str) -> dict[str, Any]:
        """Return the result of get_predict_args or get_train_args, {} without such a method. Raises: its exceptions."""
        method = self.method(name)
        try:
            declared = {} if method is None else method()
        except NotImplementedError:
            declared = {}
        except AttributeError as error:  # the method's own; it counts as a missing method, as in the original
            log(error)
            declared = {}
        if not isinstance(declared, dict):
            raise TypeError(f"{name} returned {type(declared).__name__}, not a dict of fields")
        return declared

    def warm(self) -> None:
        """Let the model prepare itself. Raises: its exceptions, except NotImplementedError."""
        method = self.method("warm")
        if method is not None:
            with contextlib.suppress(NotImplementedError):
                method()

    def metadata(self, href: str) -> bytes:
        """Answer with the metadata, which override the defaults. Raises: the exceptions of get_metadata, TypeError."""
        metadata = {"id": self.name, "name": self.name, "links": [{"rel": "self", "href": href}]}
        try:
            own = self.model.get_metadata()
        except (NotImplementedError, AttributeError):
            text = f"Could not load description from underlying model (loaded '{self.name}')"
            own = {"id": "0", "name": self.name, "description": text}
        metadata.update(own)
        return json_answer(metadata)


def _import_target(target: str) -> Any:
    """Import an entry point's target: `module`, `module:attr`, `module:attr.attr`, with optional extras in brackets."""
    module, _, path = target.partition("[")[0].strip().partition(":")
    names = [name for name in path.strip().split(".") if name]
    found: Any = importlib.import_module(module.strip())
    found = functools.reduce(getattr, names, found)
    return found() if isinstance(found, type) and not _needs_no_instance(found) else found


def _needs_no_instance(found: type) -> bool:
    """Return whether none of a class's METHODS needs an instance. Abstract methods do not count."""
    own = [inspect.getattr_static(found, name, None) for name in METHODS]
    methods = [each for each in own if each is not None and not getattr(each, "__isabstractmethod__", False)]
    return all(isinstance(each, staticmethod | classmethod) for each in methods)
