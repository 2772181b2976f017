"""What users' modules leave behind when a model's hooks have ended. Called by who keeps Models with their Hooks."""

from __future__ import annotations

import asyncio
import gc

from penstock.batching.model import Model


async def let_go(model: Model) -> None:
    """Free what the modules of a model's hooks have, once the hooks are closed and nobody has them any more.

    Functions and the globals that they lie among are a cycle, tables and encoders of any size included, and the
    collector comes seldom in a server (`settle_memory`): one that is loaded again and again would hold all of them.
    On a thread, since users' finalizers may wait for something.
    """
    spec = model.spec.hooks
    if spec is not None and spec.has_file and not spec.workers:
        await asyncio.to_thread(gc.collect)
