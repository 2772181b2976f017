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
    """Put the dicts of the target's package back as they were, those of other modules and of objects not.

    Nothing is put back if a module of the package was imported meanwhile: what that enters into a registry, it enters
    once.
    """
    package = target.partition("[")[0].partition(":")[0].strip().partition(".")[0]
    modules = _modules_of(package)
    kept = _dicts_of(list(modules.values()))
    yield
    if _modules_of(package).keys() != modules.keys():
        return
    for each, was in kept:
        if len(each) != len(was) or any(each.get(key, each) is not value for key, value in was.items()):
            each.clear()
            each.update(was)


def _modules_of(package: str) -> dict[str, Any]:
    """Give what is imported of a package, by its names."""
    return {name: found for name, found in list(sys.modules.items()) if name.partition(".")[0] == package}


def _dicts_of(modules: list[Any]) -> list[tuple[Any, dict[Any, Any]]]:
    """Give the dicts in the modules' globals, and those in them, each with what is in it now."""
    named = [pair for each in modules for pair in getattr(each, "__dict__", {}).items()]
    waiting = [value for name, value in named if not name.startswith("__")]
    seen = {id(sys.modules)}
    kept = []
    while waiting:
        each = waiting.pop()
        if type(each) in _PLAIN and id(each) not in seen:
            seen.add(id(each))
            kept.append((each, dict(each)))
            waiting.extend(each.values())
    return kept
