"""Frees what user modules leave behind when a model's hooks are closed. Used by the holders of Models with Hooks."""

from __future__ import annotations

import asyncio
import gc

from penstock.batching.model import Model


async def collect_garbage(model: Model) -> None:
    """Free the objects of a model's hook modules, once the hooks are closed and no longer referenced.

    Functions and their module globals form cycles, which may include tables and encoders of any size, and a server
    collects garbage rarely (`collect_and_freeze`): without this, repeated reloads would keep all of them.
    Done on a thread, because user finalizers may wait.
    """
    spec = model.spec.hooks
    if spec is not None and spec.has_file and not spec.workers:
        await asyncio.to_thread(gc.collect)
