"""ReplicaPlan: how many instances of a hook file there are to be, by what is said and by what the file does.

Called when a model is loaded and by `penstock check`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from penstock.backends.errors import Code, InferError
from penstock.batching.spec import HookSpec

from .writes import INSTANCE, MACHINE, PICKLES, files_of, written_globals

DEFAULT_REPLICAS = 8
LIGHT_REPLICAS = 32
"""Where a dialect promises an instance to every request, and they are light: as many requests can share a batch, and be
on their way to a model that is far."""

_OF_THREADS = re.compile(
    r"\b_?(threading|thread|greenlet|gevent|eventlet|contextvars|asyncio|decimal|sqlite3|local|scoped_session|signal"
    r"|seterr\w*|errstate|get_ident|get_native_id|current_thread|importlib|__import__|exec|eval)\b|_local\b|_thread\w*"
)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """How a hook file is instantiated, and why. `shared`: one instance for all requests, called once at a time.

    `light`: how many there may be while they are light; of a shared one, beside it, while its hooks wait. `together`:
    they need no thread each. `alone`: what they write, other processes see, so that there can be no other instance
    anywhere. `constant`: the file was read, and writes no globals.
    """

    replicas: int
    shared: bool
    reason: str
    light: int = 0
    together: bool = False
    alone: bool = False
    constant: bool = False


def plan(spec: HookSpec) -> ReplicaPlan:
    """Decide by what the configuration says, and where it is silent by whether the file writes globals.

    Raises: InferError (INVALID) for a file that does not parse or a setting out of range.
    """
    if not spec.has_file:
        return ReplicaPlan(0, shared=True, reason="none, there is no file")
    if spec.replicas == "shared":
        return ReplicaPlan(1, shared=True, reason="one instance for all requests, as configured")
    if isinstance(spec.replicas, int) and not isinstance(spec.replicas, bool) and spec.replicas > 0:
        return ReplicaPlan(spec.replicas, shared=False, reason=f"up to {spec.replicas} instances, as configured")
    if spec.replicas is not None:
        text = f'hooks file {spec.path}: replicas: got {spec.replicas!r}, takes an integer above 0 or "shared"'
        raise InferError(Code.INVALID, text)
    try:
        # what only an instance of its own can keep apart, and nothing short of that, where one is promised
        writes = written_globals(spec.path, roots=spec.roots, strict=spec.dialect == "cortex")
    except SyntaxError as error:
        raise InferError(Code.INVALID, f"hooks file {spec.path}: line {error.lineno}: {error.msg}") from error
    except (OSError, ValueError) as error:
        raise InferError(Code.INVALID, f"hooks file {spec.path}: {error}") from error
    if not writes:
        reason = "one instance for all requests: globals are never written"
        return ReplicaPlan(1, shared=True, reason=reason, light=LIGHT_REPLICAS, constant=True)
    listed = ", ".join(map(str, writes[:5])) + (f" and {len(writes) - 5} more" if len(writes) > 5 else "")
    reaches = {write.reach for write in writes} - {INSTANCE} if spec.dialect else set()
    if reaches:
        # instances in one process would not keep it apart; processes would, where it stays in them
        reason = f"one request at a time in each process: shared state is written: {listed}"
        return ReplicaPlan(1, shared=False, reason=reason, alone=MACHINE in reaches)
    light = LIGHT_REPLICAS if spec.dialect else DEFAULT_REPLICAS
    reason = f"up to {light} instances: globals are written: {listed}"
    together = not knows_threads(spec)
    return ReplicaPlan(DEFAULT_REPLICAS, shared=False, reason=reason, light=light, together=together)


def knows_threads(spec: HookSpec) -> bool:
    """Tell whether the user's files name something that is another thing in another thread."""
    if spec.path.suffix in PICKLES:
        return True
    return any(_OF_THREADS.search(ast.unparse(tree)) for _, tree in files_of(spec.path, spec.roots))
