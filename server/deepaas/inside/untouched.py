"""Undoes what declaring arguments changes in a model that predicts or trains. Called by service.py.

Source: deepaas 2.6.0: the server process requested the arguments, and no worker saw the effects. Modules of the DEEP
catalog for images, sounds and plankton depend on that: get_predict_args puts the available choices into the module's
configuration, a dict of dicts, with which the saved state of a training is compared when it is loaded.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

_RESTORED_TYPES = (dict, OrderedDict)
"""Types that are traversed and restored: other types may have side effects."""


@contextlib.contextmanager
def restoring_dicts(target: str) -> Iterator[None]:
    """Restore the dicts of the target's package, but not those of other modules and of objects.

    A dict that was empty keeps what was added. Nothing is restored if a module of the package was imported meanwhile,
    or a name in one was rebound: registrations and flags of completed work that go with it must remain.
    """
    package = target.partition("[")[0].partition(":")[0].strip().partition(".")[0]
    before = _names_of(package)
    copies = _dicts_of(package)
    yield
    after = _names_of(package)
    if before.keys() != after.keys() or any(after[name] is not value for name, value in before.items()):
        return
    for each, copied in copies:
        if len(each) != len(copied) or any(each.get(key, each) is not value for key, value in copied.items()):
            each.clear()
            each.update(copied)


def _is_of(package: str, module: str) -> bool:
    return module.partition(".")[0] == package


def _globals(package: str, *, inside: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the globals of a package's imported modules, or of all others, by module name."""
    for name, module in list(sys.modules.items()):
        if _is_of(package, name) is inside:
            yield name, dict(getattr(module, "__dict__", {}))


def _names_of(package: str) -> dict[tuple[str, str], Any]:
    """Return the values of all names in the modules of a package."""
    return {(module, name): value for module, found in _globals(package, inside=True) for name, value in found.items()}


def _dicts_of(package: str) -> list[tuple[Any, dict[Any, Any]]]:
    """Return the dicts in a package's globals, and those nested in them, each with a copy of its content."""
    waiting = [value for (_, name), value in _names_of(package).items() if not name.startswith("__")]
    seen = {id(value) for _, found in _globals(package, inside=False) for value in found.values()}
    seen.add(id(sys.modules))
    copies = []
    while waiting:
        each = waiting.pop()
        if type(each) in _RESTORED_TYPES and each and id(each) not in seen:
            seen.add(id(each))
            copies.append((each, dict(each)))
            waiting.extend(each.values())
    return copies
