"""What a model that predicts or trains keeps of being asked for its arguments: nothing. Called by service.py.

Source: deepaas 2.6.0: the server's process asked, and what came of it no worker saw. The modules of the DEEP catalogue
that classify images, sounds and plankton are written for that: get_predict_args puts what there is to choose from into
the module's configuration, a dict of dicts, against which what a training had saved is checked when it is loaded.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

_PLAIN = (dict, OrderedDict)
"""Types that are walked and put back: what is of another type has a mind of its own."""


@contextlib.contextmanager
def untouched(target: str) -> Iterator[None]:
    """Put what the dicts of the target's package held back, those of other modules and of objects not.

    A dict that was empty stays as it was filled. Nothing is put back if a module of the package was imported meanwhile,
    or a name in one bound anew: what that enters into a registry, or has been noted as done, is done once.
    """
    package = target.partition("[")[0].partition(":")[0].strip().partition(".")[0]
    before = _names_of(package)
    kept = _dicts_of(package)
    yield
    after = _names_of(package)
    if before.keys() != after.keys() or any(after[name] is not value for name, value in before.items()):
        return
    for each, was in kept:
        if len(each) != len(was) or any(each.get(key, each) is not value for key, value in was.items()):
            each.clear()
            each.update(was)


def _is_of(package: str, module: str) -> bool:
    return module.partition(".")[0] == package


def _globals(package: str, *, of_it: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the globals of what is imported of a package, or of what is not of it, by the modules' names."""
    for name, module in list(sys.modules.items()):
        if _is_of(package, name) is of_it:
            yield name, dict(getattr(module, "__dict__", {}))


def _names_of(package: str) -> dict[tuple[str, str], Any]:
    """Give what each name in the modules of a package stands for."""
    return {(module, name): value for module, found in _globals(package, of_it=True) for name, value in found.items()}


def _dicts_of(package: str) -> list[tuple[Any, dict[Any, Any]]]:
    """Give the dicts in a package's globals, and those in them, each with what is in it now."""
    waiting = [value for (_, name), value in _names_of(package).items() if not name.startswith("__")]
    seen = {id(value) for _, found in _globals(package, of_it=False) for value in found.values()}
    seen.add(id(sys.modules))
    kept = []
    while waiting:
        each = waiting.pop()
        if type(each) in _PLAIN and each and id(each) not in seen:
            seen.add(id(each))
            kept.append((each, dict(each)))
            waiting.extend(each.values())
    return kept
