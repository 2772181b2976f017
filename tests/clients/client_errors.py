"""Failed calls of a Triton client: their status and message."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException


def refused(call: Any, *args: Any, **options: Any) -> tuple[str, str]:
    """Make a call that must fail."""
    with pytest.raises(InferenceServerException) as caught:
        call(*args, **options)
    return caught.value.status(), caught.value.message()


async def refused_later(call: Awaitable[Any]) -> tuple[str, str]:
    """Await a call that must fail."""
    with pytest.raises(InferenceServerException) as caught:
        await call
    return caught.value.status(), caught.value.message()
