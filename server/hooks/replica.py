"""Replica: one instance of a model's hook file. Made and kept by `replicas.py`; its calls run on a Bench."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.batching.devices.memory import resident_bytes
from penstock.batching.model import Model
from penstock.batching.spec import HookSpec

from .bench import Bench
from .bound_hooks import BoundHooks, bind
from .call import STATISTICS_NAMES, HookCall, MovedError, ReplicaOwner, about_of, log, refusal, tell
from .conversions import of_model
from .holding import LONG_NS
from .interrupt import interrupt
from .loading import POST, PRE, HookModule, brief
from .packing import INPUTS
from .plain import is_small
from .seat import Seat
from .swift import are_small, is_swift, set_here
from .writes import parsed

if TYPE_CHECKING:
    from .pull import Pull

LOAD_LIMIT_S = 300.0
"""A hook file that takes longer to load has failed. Files may fetch encoders and vocabularies while loading."""

SLOW_NS = 1_000_000
"""A swift hook ends sooner, unless the machine was busy, which the CPU time shows."""
DOUBTED = 16
"""The number of calls whose CPU time is checked after a slow one."""
_LOAD = "load"


class Replica:
    """One instance of the user's module; its hooks run one at a time, in call order.

    Invariant: every call's future is completed exactly once: by the hook's result or error, by the limit, by
    `MovedError`, or by its own cancellation.
    Once `ready`: `has_pre` and `has_post`, which hooks the file has; `yields`, post_inference is a generator function;
    `is_async`, a hook is an `async def`. `load_bytes` is approximately how much the process has grown. `pulls` are the
    generators that it has begun. `waiting` counts unfinished calls. `swift` names the hooks that, for small values, run
    at once on the event loop, whatever else is running: they can neither wait nor modify anything (swift.py).
    Threads: the event loop's, except for what a Bench calls itself, and `pulls`.
    """

    def __init__(
        self, model: Model, spec: HookSpec, loop: asyncio.AbstractEventLoop, owner: ReplicaOwner,
        bench: Bench | None = None, *, constant: bool = False,
    ) -> None:  # fmt: skip
        self._model = model
        self._spec = spec
        self._loop = loop
        self._owner = owner
        self.limit_ns = int(spec.timeout_s * 1e9)
        self.has_pre = self.has_post = self.yields = self.is_async = False
        self.load_bytes = 0
        self.bound: Any = None
        self.swift: frozenset[str] = frozenset()
        self._constant = constant
        self._doubted = 0
        self._module: HookModule | None = None
        self._stuck: Seat | None = None
        self._stopping = self._leaving = False
        self._told_ns = 0
        self.pulls: set[Pull] = set()
        self.waiting = 0
        self._load = _Load(_LOAD, None, INPUTS, 0, "")
        self.bench = bench or Bench(model.name, model.version, loop)
        self.bench.join(self)
        self.ready = self.submit(self._load)

    # -- on the event loop -------------------------------------------------------------------------------------

    @property
    def load_ns(self) -> int:
        """How long loading took, once `ready`."""
        return self._load.end_ns - self._load.start_ns

    @property
    def serves(self) -> bool:
        """Whether a call given to it will run; its owner may learn later that it has stopped."""
        return not self._stopping

    @property
    def hangs(self) -> bool:
        """Whether it was abandoned and its thread is still running."""
        return self._stuck is not None and self._stuck.thread.is_alive()

    @property
    def awaited(self) -> bool:
        """Whether a call is waiting for the running one to end. Threads: any."""
        return self.bench.awaited

    @property
    def measures(self) -> bool:
        """Whether the CPU time of calls must be reported. Threads: any."""
        return self._owner.measures

    def submit(self, call: HookCall) -> asyncio.Future[Any]:
        """Run a hook; if its future is cancelled, a running hook continues, and a waiting one is skipped.

        Raises: MovedError.
        """
        future = call.future = self._loop.create_future()
        self.put(call)
        return future

    def put(self, call: HookCall) -> None:
        """Run a hook whose future already exists. Raises: MovedError."""
        if self._stopping:
            raise MovedError
        call.replica = self
        self.waiting += 1
        if call.hook in self.swift and self._owner.few and (call.small or are_small(call.value)):
            self._run(call)
        else:
            self.bench.put(call, at_once=self._owner.quiet)

    def _run(self, call: HookCall) -> None:
        """Run a hook inline."""
        start_ns = time.monotonic_ns()
        cpu_ns = time.thread_time_ns() if self._doubted else 0
        if call.begins(start_ns):
            try:
                call.result = call.made(self.bound, call.invoke(self.bound))
            except BaseException as error:  # noqa: BLE001 - any error becomes the request's
                self.refuse(call, error, kept=True)
                if call.hook != PRE:
                    self.swift -= {call.hook}  # logging each failure takes longer than using a thread
        call.end_ns = time.monotonic_ns()
        if call.end_ns - start_ns > SLOW_NS:
            self._doubted = DOUBTED
        if cpu_ns:
            self._doubted -= 1
            if time.thread_time_ns() - cpu_ns > SLOW_NS:
                self.swift -= {call.hook}
        self.settle(call)

    def relieve(self, other: Replica) -> None:
        """Take over the call that has waited longest for another, equivalent replica."""
        call = other.bench.take_one()
        if call is not None:
            other.waiting -= 1
            call.replica = self
            self.waiting += 1
            self.bench.put(call, at_once=self._owner.quiet)

    def leave(self) -> None:
        """Give the replica back to its owner, once none of its hooks is running."""
        if self.waiting:
            self._leaving = True
        else:
            self._owner.freed(self)

    def stop(self) -> None:
        """Release the instance once its calls are done, without waiting for that."""
        if not self._stopping:
            self._stopping = True
            self.bench.leave(self)

    def watch(self, now_ns: int) -> int:
        """Abandon the replica if its hook exceeds its limit at `now_ns`, and others on its threads likewise."""
        return self.bench.watch(now_ns)

    def limit_of(self, call: HookCall) -> int:
        """Return the time limit of a call, in nanoseconds."""
        return int(LOAD_LIMIT_S * 1e9) if call is self._load else self.limit_ns

    def settle(self, call: HookCall) -> None:
        """Complete a call's future."""
        self.waiting -= 1
        name = STATISTICS_NAMES.get(call.hook)
        if name is not None and call.start_ns:
            took_ns = call.end_ns - call.start_ns
            self._model.statistics.record_hook(name, took_ns)
            if took_ns > LONG_NS or call.cpu_ns:
                self._owner.took(call, took_ns)
        future = call.future
        if not future.done():
            if call.error is not None:
                future.set_exception(call.error)
            else:
                future.set_result(call.result)
        if not self.waiting:
            self._rest(call)

    def _rest(self, call: HookCall) -> None:
        if self._leaving:
            self._leaving = False
            self._owner.freed(self)
        elif call is self._load:
            if call.error is not None:
                self.stop()
        elif self._owner.several:
            self._owner.idle(self)

    def abandoned(self, running: HookCall, seat: Seat, limit_ns: int) -> None:
        """Fail the call that has exceeded its limit, and hand back those that have not begun."""
        self._stuck, self._stopping = seat, True
        what = "loading the hooks" if running is self._load else running.hook
        text = f"{what} of model '{self._model.name}' took longer than its limit of {limit_ns / 1e9:g} s"
        log(text, about_of(self._model, running))
        self._owner.lost(self)  # first, because the callers look for another replica at once
        self._fail(running, InferError(Code.EXPIRED, text))
        self._lose()

    def died(self, running: HookCall | None) -> None:
        """Handle that user code has ended the thread, in the middle of `running` if it is set."""
        if self._stopping:
            return
        self._stopping = True
        self._owner.lost(self)  # as above
        if running is not None:
            text = f"the hooks of model '{self._model.name}' ended their thread"
            self._fail(running, InferError(Code.INTERNAL, text))
        self._lose()

    def _fail(self, call: HookCall, error: InferError) -> None:
        self.waiting -= 1
        if not call.future.done():
            call.future.set_exception(error)

    def _lose(self) -> None:
        """Hand back the calls that have not begun."""
        for call in self.bench.take_back(self):
            self.waiting -= 1
            if not call.future.done():
                call.future.set_exception(MovedError())

    def ending(self) -> HookCall:
        """Make the call that releases the instance, if its thread continues."""
        call = _Ending("end", None, INPUTS, 0, "")
        call.future = self._loop.create_future()
        call.replica = self
        self.waiting += 1
        return call

    # -- on a thread of the bench ------------------------------------------------------------------------------

    def load(self) -> None:
        """Run the file. Raises: InferError."""
        before_bytes, before = resident_bytes(), set_here()
        spec, decoupled = self._spec, self._model.spec.decoupled
        module = HookModule(
            spec.path, decoupled=decoupled, roots=spec.roots, dialect=spec.dialect, label=self._model.name
        )
        self._module = module
        metadata, self.yields = copy.deepcopy(dict(spec.metadata)), module.yields
        rules = of_model(self._model, for_hooks=True)
        self.bound = bound = bind(module, rules, self._model.signature, metadata)
        self.has_pre, self.has_post = (bound.functions[hook] is not None for hook in (PRE, POST))
        self.is_async = module.is_async
        if self._constant and is_small(metadata) and set_here() == before:
            self.swift = _swift(spec.path, module)
        self.load_bytes = resident_bytes() - before_bytes

    def shut(self) -> None:
        """Discard the instance and its generators."""
        for pull in tuple(self.pulls):
            pull.abandon()
        if self._module is not None:
            self._module.close()

    def interrupt(self, thread: threading.Thread) -> bool:
        """End a hook that spins; return whether its thread was in user code, the only place where that is possible."""
        return interrupt(thread.ident or 0, self._spec.path.parent, *self._spec.roots)

    def refuse(self, call: HookCall, error: BaseException, *, kept: bool) -> None:
        """Set the error of a failed call; `kept`: it may still be wanted."""
        if call is not self._load:
            call.error = refusal(call, error, self.bound)
            if kept:
                self._told_ns = tell(call, error, about_of(self._model, call), self._told_ns)
            return
        call.error = error if isinstance(error, InferError) else InferError(Code.INTERNAL, brief(error))
        cause = error.__cause__ if isinstance(error, InferError) else error
        if cause is not None:
            log(call.error.message, about_of(self._model, call), cause)


def _swift(path: Path, module: HookModule) -> frozenset[str]:
    try:
        tree = parsed(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # it is a pickle; or it was changed after loading
        return frozenset()
    return frozenset(name for name, function in module.functions.items() if is_swift(function, tree))


class _Load(HookCall):
    """The load of the file."""

    __slots__ = ()

    def invoke(self, bound: BoundHooks) -> None:
        self.replica.load()

    def made(self, bound: BoundHooks, result: Any) -> None:
        pass


class _Ending(_Load):
    """The end of an instance whose thread continues with others."""

    __slots__ = ()

    def invoke(self, bound: BoundHooks) -> None:
        self.replica.shut()
