"""Replica: one instance of a model's hook file, on a thread of its own. Made and kept by `replicas.py`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.batching.memory import resident_bytes
from penstock.batching.model import Model
from penstock.batching.spec import HookSpec

from .bound import Bound, bind
from .call import Call, MovedError, Owner, log, refusal, tell
from .conversions import of_model
from .holding import LONG_NS
from .interrupt import interrupt
from .loading import POST, PRE, HookModule
from .packing import INPUTS

if TYPE_CHECKING:
    from .pull import Pull

LOAD_LIMIT_S = 300.0
"""A hook file that takes longer to load has failed. Files may fetch encoders and vocabularies as they load."""

_LOAD = "load"
_RETRY_NS = 100_000_000
"""Between looks at a replica that has just been abandoned, or is to be."""
_STATISTICS_NAME = {PRE: "pre", POST: "post"}


class Replica:
    """One instance of the user's module; its hooks run one at a time, in the order they were called.

    Invariant: every call's future is settled, exactly once: by the hook's result or error, by the limit, by
    `MovedError`, or by its own cancellation.
    `has_pre`, `has_post`, `yields`, once `ready`: what the file has; its post_inference is a generator function.
    `load_bytes` is about what the process has grown by. `pulls` are the generators that it has begun.
    Threads: the event loop's, but for what `_main` calls and `pulls`; `_lock` decides between a hook that ends and a
    limit that strikes. An `async` hook runs on an asyncio loop that this thread keeps running, so that its tasks live
    on between calls.
    """

    def __init__(self, model: Model, spec: HookSpec, loop: asyncio.AbstractEventLoop, owner: Owner) -> None:
        self._model = model
        self._spec = spec
        self._loop = loop
        self._owner = owner
        self._limit_ns = int(spec.timeout_s * 1e9)
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._done: deque[Call] = deque()
        self._woken = self.has_pre = self.has_post = self.yields = False
        self.load_bytes = 0
        self._lock = threading.Lock()
        self._running: Call | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._nudge: Callable[[], Any] = lambda: None
        self._abandoned = self._ended = self._stopping = self._leaving = False
        self._told_ns = 0
        self.pulls: set[Pull] = set()
        self.waiting = 0
        self._load = Call(_LOAD, None, INPUTS, 0, "")
        self.ready = self.submit(self._load)
        self._thread = threading.Thread(target=self._main, name=f"hooks-{model.name}/{model.version}", daemon=True)
        self._thread.start()

    # -- on the event loop -------------------------------------------------------------------------------------

    @property
    def load_ns(self) -> int:
        """How long it took to load, once `ready`."""
        return self._load.end_ns - self._load.start_ns

    @property
    def serves(self) -> bool:
        """Whether a call given to it will be run; its owner may hear of the end later."""
        return not (self._abandoned or self._ended or self._stopping)

    @property
    def hangs(self) -> bool:
        """Whether it was abandoned and its thread still runs."""
        return self._abandoned and self._thread.is_alive()

    @property
    def awaited(self) -> bool:
        """Whether a call waits for the one that runs to end."""
        return not self._calls.empty()

    def submit(self, call: Call) -> asyncio.Future[Any]:
        """Have one hook run; cancelling its future lets a hook that runs run on, and skips one that waits.

        Raises: MovedError.
        """
        if not self.serves:
            raise MovedError
        call.future = self._loop.create_future()
        self.waiting += 1
        self._calls.put(call)
        self._nudge()
        if self._timer is None:
            self._timer = self._loop.call_later(self._spec.timeout_s, self._watch)
        return call.future

    def leave(self) -> None:
        """Give the replica back to its owner, once no hook of it runs any more."""
        if self.waiting:
            self._leaving = True
        else:
            self._owner.freed(self)

    def stop(self) -> None:
        """End the thread when it has done what was asked; it is not waited for."""
        self._stopping = True
        self._calls.put(None)
        self._nudge()
        if self._timer is not None:
            self._timer.cancel()

    def _drain(self) -> None:
        # cleared first: a call that ends while this runs asks for another turn
        self._woken = False
        while self._done:
            self._settle(self._done.popleft())
        if self._leaving and not self.waiting:
            self._leaving = False
            self._owner.freed(self)
        if self._ended and not (self._stopping or self._abandoned):
            self._stopping = True
            if self._running is not None:
                text = f"the hooks of model '{self._model.name}' ended their thread"
                self._fail(self._running, InferError(Code.INTERNAL, text))
            self._lose()

    def _settle(self, call: Call) -> None:
        self.waiting -= 1
        name = _STATISTICS_NAME.get(call.hook)
        if name is not None and call.start_ns:
            took_ns, holding = call.end_ns - call.start_ns, self._owner.holding
            self._model.statistics.record_hook(name, took_ns)
            if holding is not None and (took_ns > LONG_NS or holding.measures):
                holding.took(call.hook, call.cpu_ns)
        if call.future.done():
            return
        if call.error is not None:
            call.future.set_exception(call.error)
        else:
            call.future.set_result(call.result)

    def _watch(self) -> None:
        """Look after the running hook. One timer, however many calls; it goes off now and then."""
        self._timer = None
        left_ns = self.watch(time.monotonic_ns())
        if left_ns:
            self._timer = self._loop.call_later(left_ns / 1e9, self._watch)

    def watch(self, now_ns: int) -> int:
        """Abandon the replica if its hook is past the limit by `now_ns`.

        Returns: in how many nanoseconds to look again; 0 for not before the next call.
        """
        self._drain()
        if self._abandoned:
            return 0 if self._interrupted() else _RETRY_NS
        if not self.waiting or self._stopping:
            return 0
        running = self._running
        if running is None:
            return self._limit_ns
        limit_ns = int(LOAD_LIMIT_S * 1e9) if running is self._load else self._limit_ns
        left_ns = running.since_ns + limit_ns - now_ns
        if left_ns > 0:
            return left_ns
        return 0 if self._abandon(running, limit_ns) and self._interrupted() else _RETRY_NS

    def _abandon(self, running: Call, limit_ns: int) -> bool:
        with self._lock:
            if self._running is not running:
                return False
            self._abandoned = True
        what = "loading the hooks" if running is self._load else running.hook
        text = f"{what} of model '{self._model.name}' took longer than its limit of {limit_ns / 1e9:g} s"
        log(text, self._about(running))
        self._fail(running, InferError(Code.EXPIRED, text))
        self._lose()
        self._nudge()
        return True

    def _interrupted(self) -> bool:
        """End the hook of an abandoned replica if it spins, which would hold the interpreter half the time.

        Returns: whether there is no more to do. One that waits in a C function ends when that returns, if ever; a
        daemon thread does not keep the process.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            ended = self._running is None or not self._thread.is_alive()
            return ended or interrupt(self._thread.ident or 0, self._spec.path.parent, *self._spec.roots)
        finally:
            self._lock.release()

    def _fail(self, call: Call, error: InferError) -> None:
        self.waiting -= 1
        if not call.future.done():
            call.future.set_exception(error)

    def _lose(self) -> None:
        """Hand back the calls that have not begun, and say so to the owner."""
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is not None:
                self.waiting -= 1
                if not call.future.done():
                    call.future.set_exception(MovedError())
        self._owner.lost(self)

    # -- on the replica's own thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        module: HookModule | None = None
        try:
            call = self._calls.get()
            if call is None or not self._begin(call):
                return
            try:
                before_bytes = resident_bytes()
                spec, decoupled = self._spec, self._model.spec.decoupled
                module = HookModule(spec.path, decoupled=decoupled, roots=spec.roots, dialect=spec.dialect)
                metadata, self.yields = copy.deepcopy(dict(spec.metadata)), module.yields
                rules = of_model(self._model, for_hooks=True)
                bound = bind(module, rules, self._model.signature, metadata)
                self.has_pre, self.has_post = (bound.functions[hook] is not None for hook in (PRE, POST))
                self.load_bytes = resident_bytes() - before_bytes
            except InferError as error:
                call.error = error
                if error.__cause__ is not None:
                    log(error.message, self._about(call), error.__cause__)
            if self._end(call) and call.error is None and module is not None:
                if module.is_async:
                    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                        runner.run(self._serve_async(bound))
                else:
                    self._serve(bound)
        except BaseException as error:  # noqa: BLE001 - a task of the user's may raise SystemExit through the loop
            if not self._abandoned:
                log("the thread of the hooks ended", {"model": self._model.name}, error)
        finally:
            self._nudge = lambda: None
            for pull in tuple(self.pulls):
                pull.abandon()
            if module is not None:
                module.close()
            self._ended = True
            self._wake()

    def _serve(self, bound: Bound) -> None:
        while (call := self._calls.get()) is not None:
            if self._begin(call):
                try:
                    call.result = call.made(bound, call.invoke(bound))
                except BaseException as error:  # noqa: BLE001 - sys.exit in a hook harms its own request only
                    self._refuse(call, error, bound)
            if not self._end(call):
                return
            del call  # or what it brought would stay until the next one comes

    async def _serve_async(self, bound: Bound) -> None:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        task = asyncio.current_task()

        def nudge() -> None:
            wake = task.cancel if self._abandoned and task is not None else arrived.set
            with contextlib.suppress(RuntimeError):  # that loop has just been closed
                loop.call_soon_threadsafe(wake)

        self._nudge = nudge
        while True:
            arrived.clear()
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                await arrived.wait()
                continue
            if call is None:
                return
            if self._begin(call):
                try:
                    result = call.invoke(bound)
                    call.result = call.made(bound, await result if inspect.isawaitable(result) else result)
                except BaseException as error:  # noqa: BLE001 - as in _serve
                    self._refuse(call, error, bound)
            if not self._end(call) or (task is not None and task.cancelling()):
                # abandoned; or a task of the user's has ended the loop, which cancels all others on its way out
                return
            call = result = None

    def _begin(self, call: Call) -> bool:
        now_ns = time.monotonic_ns()
        if call.future.done():
            return False
        if call.deadline_ns and now_ns >= call.deadline_ns:
            call.error = InferError(Code.EXPIRED, "Request timeout expired")
            return False
        call.start_ns = call.since_ns = now_ns
        if self._owner.holding is not None and self._owner.holding.measures:
            call.cpu_ns = time.thread_time_ns()
        self._running = call
        return True

    def _end(self, call: Call) -> bool:
        """Report a call; False: the replica has been abandoned, and its thread is to end."""
        call.end_ns = time.monotonic_ns()
        if call.cpu_ns:
            call.cpu_ns = time.thread_time_ns() - call.cpu_ns
        with self._lock:
            self._running = None
            if self._abandoned:
                return False
        self._done.append(call)
        self._wake()
        return True

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                # the loop is closed, and nobody waits
                self._stopping = True

    def _refuse(self, call: Call, error: BaseException, bound: Bound) -> None:
        call.error = refusal(call, error, bound)
        if not self._abandoned:
            self._told_ns = tell(call, error, self._about(call), self._told_ns)

    def _about(self, call: Call) -> dict[str, str]:
        return {"model": self._model.name} | ({"request_id": call.request_id} if call.request_id else {})
