"""Replica: one instance of a model's hook file. Made and kept by `replicas.py`; its calls run on a HookThreadPool."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.errors import Code, InferError
from penstock.batching.devices.memory import resident_bytes
from penstock.batching.model import Model
from penstock.batching.spec import HookSpec

from .call import (
    STATISTICS_NAMES,
    HookCall,
    ReplicaGoneError,
    error_for_client,
    log_context,
    log_exception,
    log_warning,
)
from .conversions import BoundHooks, bind, conversions_for
from .gil_monitor import MAX_COMPUTE_NS
from .loading import POST, PRE, HookModule, exception_line
from .nonblocking import is_nonblocking
from .packing import INPUTS
from .plain_values import are_small_tensors, is_small
from .pool_thread import PoolThread, interrupt
from .thread_pool import HookThreadPool
from .writes import parse_source

if TYPE_CHECKING:
    from .generator_call import GeneratorCall
    from .replicas import Replicas

LOAD_LIMIT_S = 300.0
"""A hook file that takes longer to load has failed. Files may fetch encoders and vocabularies while loading."""

SLOW_NS = 1_000_000
"""An inline hook ends sooner, unless the machine was busy, which the CPU time shows."""
CPU_CHECKS = 16
"""The number of calls whose CPU time is checked after a slow one."""
_LOAD = "load"


class Replica:
    """One instance of the user's module; its hooks run one at a time, in call order.

    Invariant: every call's future is completed exactly once: by the hook's result or error, by the limit, by
    `ReplicaGoneError`, or by its own cancellation.
    Once `ready`: `has_pre` and `has_post`, which hooks the file has; `yields`, post_inference is a generator function;
    `is_async`, a hook is an `async def`. `load_bytes` is approximately how much the process has grown. `generators` are
    the generators that it has begun. `pending_calls` counts unfinished calls. `inline_hooks` names the hooks that, for
    small values, run at once on the event loop, whatever else is running: they can neither wait nor modify anything
    (nonblocking.py).
    Threads: the event loop's, except for what a HookThreadPool calls itself, and `generators`.
    """

    def __init__(
        self, model: Model, spec: HookSpec, loop: asyncio.AbstractEventLoop, owner: Replicas,
        pool: HookThreadPool | None, *, is_constant: bool,
    ) -> None:  # fmt: skip
        self._model = model
        self._spec = spec
        self._loop = loop
        self._owner = owner
        self.limit_ns = int(spec.timeout_s * 1e9)
        self.has_pre = self.has_post = self.yields = self.is_async = False
        self.load_bytes = 0
        self.bound: Any = None
        self.inline_hooks: frozenset[str] = frozenset()
        self._is_constant = is_constant
        self._cpu_checks = 0
        self._module: HookModule | None = None
        self._hanging_thread: PoolThread | None = None
        self._stopping = self._release_when_idle = False
        self._last_traceback_ns = 0
        self.generators: set[GeneratorCall] = set()
        self.pending_calls = 0
        self._load = _LoadCall(_LOAD, None, INPUTS, 0, "")
        self.pool = pool or HookThreadPool(model.name, model.version, loop)
        self.pool.add(self)
        self.ready = self.submit(self._load)

    # -- on the event loop -------------------------------------------------------------------------------------

    @property
    def load_ns(self) -> int:
        """How long loading took, once `ready`."""
        return self._load.end_ns - self._load.start_ns

    @property
    def is_serving(self) -> bool:
        """Whether a call given to it will run; its owner may learn later that it has stopped."""
        return not self._stopping

    @property
    def is_hanging(self) -> bool:
        """Whether it was abandoned and its thread is still running."""
        return self._hanging_thread is not None and self._hanging_thread.thread.is_alive()

    @property
    def has_waiting(self) -> bool:
        """Whether a call is waiting for the running one to end. Threads: any."""
        return self.pool.has_waiting

    @property
    def measures_cpu(self) -> bool:
        """Whether the CPU time of calls must be reported. Threads: any."""
        return self._owner.measures_cpu

    def submit(self, call: HookCall) -> asyncio.Future[Any]:
        """Run a hook; if its future is cancelled, a running hook continues, and a waiting one is skipped.

        Raises: ReplicaGoneError.
        """
        future = call.future = self._loop.create_future()
        self.dispatch(call)
        return future

    def dispatch(self, call: HookCall) -> None:
        """Run a hook whose future already exists. Raises: ReplicaGoneError."""
        if self._stopping:
            raise ReplicaGoneError
        call.replica = self
        self.pending_calls += 1
        if (
            call.hook in self.inline_hooks
            and self._owner.lightly_loaded
            and (call.is_small or are_small_tensors(call.value))
        ):
            self._run_inline(call)
        else:
            self.pool.enqueue(call, wake_now=self._owner.expects_single_call)

    def _run_inline(self, call: HookCall) -> None:
        """Run a hook inline."""
        start_ns = time.monotonic_ns()
        cpu_ns = time.thread_time_ns() if self._cpu_checks else 0
        if call.try_start(start_ns):
            try:
                call.result = call.convert_result(self.bound, call.invoke(self.bound))
            except BaseException as error:  # noqa: BLE001 - any error becomes the request's
                self.set_error(call, error, should_log=True)
                if call.hook != PRE:
                    self.inline_hooks -= {call.hook}  # logging each failure takes longer than using a thread
        call.end_ns = time.monotonic_ns()
        if call.end_ns - start_ns > SLOW_NS:
            self._cpu_checks = CPU_CHECKS
        if cpu_ns:
            self._cpu_checks -= 1
            if time.thread_time_ns() - cpu_ns > SLOW_NS:
                self.inline_hooks -= {call.hook}
        self.settle(call)

    def take_over_from(self, other: Replica) -> None:
        """Take over the call that has waited longest for another, equivalent replica."""
        call = other.pool.pop_oldest()
        if call is not None:
            other.pending_calls -= 1
            call.replica = self
            self.pending_calls += 1
            self.pool.enqueue(call, wake_now=self._owner.expects_single_call)

    def release(self) -> None:
        """Give the replica back to its owner, once none of its hooks is running."""
        if self.pending_calls:
            self._release_when_idle = True
        else:
            self._owner.on_released(self)

    def stop(self) -> None:
        """Release the instance once its calls are done, without waiting for that."""
        if not self._stopping:
            self._stopping = True
            self.pool.remove(self)

    def enforce_limits(self, now_ns: int) -> int:
        """Abandon the replica if its hook exceeds its limit at `now_ns`, and others on its threads likewise."""
        return self.pool.enforce_limits(now_ns)

    def limit_of(self, call: HookCall) -> int:
        """Return the time limit of a call, in nanoseconds."""
        return int(LOAD_LIMIT_S * 1e9) if call is self._load else self.limit_ns

    def settle(self, call: HookCall) -> None:
        """Complete a call's future."""
        self.pending_calls -= 1
        name = STATISTICS_NAMES.get(call.hook)
        if name is not None and call.start_ns:
            duration_ns = call.end_ns - call.start_ns
            self._model.statistics.record_hook(name, duration_ns)
            if duration_ns > MAX_COMPUTE_NS or call.cpu_ns:
                self._owner.record_call(call, duration_ns)
        future = call.future
        if not future.done():
            if call.error is not None:
                future.set_exception(call.error)
            else:
                future.set_result(call.result)
        if not self.pending_calls:
            self._on_idle(call)

    def _on_idle(self, call: HookCall) -> None:
        if self._release_when_idle:
            self._release_when_idle = False
            self._owner.on_released(self)
        elif call is self._load:
            if call.error is not None:
                self.stop()
        elif self._owner.has_equivalents:
            self._owner.on_idle(self)

    def abandon(self, running: HookCall, pool_thread: PoolThread, limit_ns: int) -> None:
        """Fail the call that has exceeded its limit, and hand back those that have not begun."""
        self._hanging_thread, self._stopping = pool_thread, True
        what = "loading the hooks" if running is self._load else running.hook
        text = f"{what} of model '{self._model.name}' took longer than its limit of {limit_ns / 1e9:g} s"
        log_warning(text, log_context(self._model, running))
        self._owner.on_failed(self)  # first, because the callers look for another replica at once
        self._fail(running, InferError(Code.EXPIRED, text))
        self._return_waiting()

    def on_thread_died(self, running: HookCall | None) -> None:
        """Handle that user code has ended the thread, in the middle of `running` if it is set."""
        if self._stopping:
            return
        self._stopping = True
        self._owner.on_failed(self)  # as above
        if running is not None:
            text = f"the hooks of model '{self._model.name}' ended their thread"
            self._fail(running, InferError(Code.INTERNAL, text))
        self._return_waiting()

    def _fail(self, call: HookCall, error: InferError) -> None:
        self.pending_calls -= 1
        if not call.future.done():
            call.future.set_exception(error)

    def _return_waiting(self) -> None:
        """Hand back the calls that have not begun."""
        for call in self.pool.withdraw(self):
            self.pending_calls -= 1
            if not call.future.done():
                call.future.set_exception(ReplicaGoneError())

    def make_end_call(self) -> HookCall:
        """Make the call that releases the instance, if its thread continues."""
        call = _EndCall("end", None, INPUTS, 0, "")
        call.future = self._loop.create_future()
        call.replica = self
        self.pending_calls += 1
        return call

    # -- on a thread of the pool ------------------------------------------------------------------------------

    def load(self) -> None:
        """Run the file. Raises: InferError."""
        before_bytes, before = resident_bytes(), _thread_settings()
        spec, decoupled = self._spec, self._model.spec.decoupled
        module = HookModule(
            spec.path, decoupled=decoupled, roots=spec.roots, dialect=spec.dialect, label=self._model.name
        )
        self._module = module
        metadata, self.yields = copy.deepcopy(dict(spec.metadata)), module.yields
        conversions = conversions_for(self._model, for_hooks=True)
        self.bound = bound = bind(module, conversions, self._model.signature, metadata)
        self.has_pre, self.has_post = (bound.functions[hook] is not None for hook in (PRE, POST))
        self.is_async = module.is_async
        if self._is_constant and is_small(metadata) and _thread_settings() == before:
            self.inline_hooks = _find_inline_hooks(spec.path, module)
        self.load_bytes = resident_bytes() - before_bytes

    def close_instance(self) -> None:
        """Discard the instance and its generators."""
        for generator in tuple(self.generators):
            generator.close_quietly()
        if self._module is not None:
            self._module.close()

    def interrupt(self, thread: threading.Thread) -> bool:
        """End a hook that spins; return whether its thread was in user code, the only place where that is possible."""
        return interrupt(thread.ident or 0, self._spec.path.parent, *self._spec.roots)

    def set_error(self, call: HookCall, error: BaseException, *, should_log: bool) -> None:
        """Set the error of a failed call; `should_log`: it may still be wanted."""
        if call is not self._load:
            call.error = error_for_client(call, error, self.bound)
            if should_log:
                self._last_traceback_ns = log_exception(
                    call, error, log_context(self._model, call), self._last_traceback_ns
                )
            return
        call.error = error if isinstance(error, InferError) else InferError(Code.INTERNAL, exception_line(error))
        cause = error.__cause__ if isinstance(error, InferError) else error
        if cause is not None:
            log_warning(call.error.message, log_context(self._model, call), cause)


def _find_inline_hooks(path: Path, module: HookModule) -> frozenset[str]:
    try:
        tree = parse_source(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # it is a pickle; or it was changed after loading
        return frozenset()
    return frozenset(name for name, function in module.functions.items() if is_nonblocking(function, tree))


class _LoadCall(HookCall):
    """The load of the file."""

    __slots__ = ()

    def invoke(self, bound: BoundHooks) -> None:
        self.replica.load()

    def convert_result(self, bound: BoundHooks, result: Any) -> None:
        pass


class _EndCall(_LoadCall):
    """The end of an instance whose thread continues with others."""

    __slots__ = ()

    def invoke(self, bound: BoundHooks) -> None:
        self.replica.close_instance()


def _thread_settings() -> Any:
    """Return the settings of this thread, such as numpy's error handling: a file that changes them needs its thread."""
    return contextvars.copy_context(), np.geterr()
