"""ReplicaPlan: the number of instances of a hook file, from the configuration and from what the file does.

Used when a model is loaded and by `penstock check`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from penstock.backends.errors import Code, InferError
from penstock.batching.spec import HookSpec

from .writes import INSTANCE, MACHINE, PICKLE_SUFFIXES, find_global_writes, source_files

DEFAULT_REPLICAS = 8
LIGHT_REPLICAS = 32
"""For dialects that guarantee each request its own instance, if instances are light: as many as requests can share a
batch and be in transit to a remote model."""

_THREAD_WORDS = re.compile(
    r"\b_?(threading|thread|greenlet|gevent|eventlet|contextvars|asyncio|decimal|sqlite3|local|scoped_session|signal"
    r"|seterr\w*|errstate|get_ident|get_native_id|current_thread|importlib|__import__|exec|eval)\b|_local\b|_thread\w*"
)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """How a hook file is instantiated, and why. `shared`: one instance for all requests, called one at a time.

    `max_light`: the maximum number while instances are light; for a shared one, the number of others while its hooks
    wait. `shares_threads`: they do not each need a thread. `is_exclusive`: their writes are visible to other processes,
    so there can be no other instance anywhere. `is_constant`: the file was analyzed, and writes no globals.
    """

    replicas: int
    shared: bool
    reason: str
    max_light: int = 0
    shares_threads: bool = False
    is_exclusive: bool = False
    is_constant: bool = False


def plan_replicas(spec: HookSpec) -> ReplicaPlan:
    """Decide by the configuration, or if it is silent by whether the file writes globals.

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
        # where an instance per request is guaranteed, find everything that only separate instances can isolate
        writes = find_global_writes(spec.path, roots=spec.roots, strict=spec.dialect == "cortex")
    except SyntaxError as error:
        raise InferError(Code.INVALID, f"hooks file {spec.path}: line {error.lineno}: {error.msg}") from error
    except (OSError, ValueError) as error:
        raise InferError(Code.INVALID, f"hooks file {spec.path}: {error}") from error
    if not writes:
        reason = "one instance for all requests: globals are never written"
        return ReplicaPlan(1, shared=True, reason=reason, max_light=LIGHT_REPLICAS, is_constant=True)
    listed = ", ".join(map(str, writes[:5])) + (f" and {len(writes) - 5} more" if len(writes) > 5 else "")
    reaches = {write.reach for write in writes} - {INSTANCE} if spec.dialect else set()
    if reaches:
        # separate instances in one process would not isolate it; separate processes would, if it stays within them
        reason = f"one request at a time in each process: shared state is written: {listed}"
        return ReplicaPlan(1, shared=False, reason=reason, is_exclusive=MACHINE in reaches)
    max_light = LIGHT_REPLICAS if spec.dialect else DEFAULT_REPLICAS
    reason = f"up to {max_light} instances: globals are written: {listed}"
    shares_threads = not uses_thread_state(spec)
    return ReplicaPlan(
        DEFAULT_REPLICAS, shared=False, reason=reason, max_light=max_light, shares_threads=shares_threads
    )


def uses_thread_state(spec: HookSpec) -> bool:
    """Return whether the user's files use anything that is thread-specific."""
    if spec.path.suffix in PICKLE_SUFFIXES:
        return True
    return any(_THREAD_WORDS.search(ast.unparse(tree)) for _, tree in source_files(spec.path, spec.roots))
