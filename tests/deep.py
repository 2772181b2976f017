"""Deep: only the property tests, with examples other than the usual ones, and many times as many.

`DEEP=15 pytest -p tests.deep tests/batching` took 15 minutes, and found what the usual examples had not.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest

TIMES = float(os.environ.get("DEEP", "10"))
_NAME = "_hypothesis_internal_use_settings"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that hypothesis generates examples for, and make it generate more."""
    deepened = {_holder(item): None for item in items}
    items[:] = [item for item in items if _holder(item)[0] is not None]
    for holder, name in deepened:
        if holder is not None:
            setattr(holder, name, _deeper(getattr(holder, name)))


def _holder(item: Any) -> tuple[Any, str]:
    """Return the object with a test's settings, and their name there; None for a test without examples."""
    machine = getattr(item, "cls", None)
    if isinstance(getattr(machine, "settings", None), hypothesis.settings):
        return machine, "settings"
    function = getattr(item.obj, "__func__", item.obj)
    return (function if hasattr(function, _NAME) else None), _NAME


def _deeper(settings: hypothesis.settings) -> hypothesis.settings:
    return hypothesis.settings(settings, max_examples=int(settings.max_examples * TIMES), derandomize=False)
