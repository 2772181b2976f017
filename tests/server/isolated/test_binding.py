from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.backend import Array
from penstock.backends.errors import Code, DeviceLost, DeviceRemoved, InferError, OutOfMemory, RunStopped
from penstock.server.isolated.backend import IsolatedBackend
from penstock.server.isolated.binding import IsolatedBinding
from penstock.server.isolated.kinds import read_failure, read_run, write_failure, write_run
from penstock.server.workers import worker as worker_module
from tests.processes import descriptors, lives
from tests.server.isolated.faulty import Fault
from tests.server.isolated.stage import PATIENCE_S, faulty, nothing_left, until

LARGE = (2, 75_000)
"""600 kB."""


def bound(backend: IsolatedBackend, capacity_rows: int = 8) -> IsolatedBinding:
    binding = backend.bind(replace(backend.graph, batched=True), capacity_rows)
    assert isinstance(binding, IsolatedBinding)
    return binding


def ask(binding: IsolatedBinding, x: Array, *wanted: int) -> list[Any]:
    (buffer,) = binding.acquire_buffers(len(x), [x.shape])
    assert buffer is not None
    buffer[...] = x
    return binding.run(wanted or (0,))


def row(*values: float) -> Array:
    return np.array([values], np.float32)


def raised(work: Callable[..., Any], *args: Any) -> InferError:
    with pytest.raises(InferError) as caught:
        work(*args)
    return caught.value


@pytest.fixture(scope="module")
def backend() -> Iterator[IsolatedBackend]:
    """Give one that nobody ends."""
    with faulty() as made:
        yield made


def base_of(array: Array) -> Any:
    """Give what an array is a view of, in the end."""
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base


@pytest.mark.slow
class TestMemory:
    def test_large_tensors_are_filled_and_read_where_they_travel(self, backend: IsolatedBackend) -> None:
        binding = bound(backend)
        x = np.arange(np.prod(LARGE), dtype=np.float32).reshape(LARGE)

        (buffer,) = binding.acquire_buffers(2, [LARGE])
        assert buffer is not None
        buffer[...] = x
        (y,) = binding.run((0,))

        np.testing.assert_array_equal(x * 2, y)
        # neither is memory of this process only: what the worker reads is what was filled, and what it wrote is read
        assert "mmap" in type(base_of(buffer)).__name__
        assert type(base_of(y)).__name__ == "Slot"

    def test_they_come_where_a_runtime_takes_them_as_they_are(self) -> None:
        with faulty(on=1) as backend:
            y, place = ask(bound(backend), np.ones(LARGE, np.float32), 0, 1)

            assert place[0] == 0
            np.testing.assert_array_equal(np.ones(LARGE), y)

    def test_an_output_outlives_its_binding_its_worker_and_many_runs(self) -> None:
        with faulty() as backend:
            binding = bound(backend)
            kept = [ask(binding, np.full(LARGE, value, np.float32))[0] for value in range(5)]
            os.kill(backend.pid, signal.SIGKILL)
            del binding
        assert [set(np.unique(each).tolist()) for each in kept] == [{2.0 * value} for value in range(5)]
        kept[0][...] = 7  # it is the caller's
        assert kept[1][0, 0] == 2.0

    def test_slots_come_back_and_memory_does_not_grow(self, backend: IsolatedBackend) -> None:
        binding = bound(backend)
        for _ in range(50):
            ask(binding, np.ones(LARGE, np.float32))

        assert binding._channel._wire.arena.total_bytes <= 4 << 20

    def test_what_was_lent_and_never_run_is_lent_again(self, backend: IsolatedBackend) -> None:
        binding = bound(backend)
        for _ in range(50):
            binding.acquire_buffers(2, [LARGE])

        assert binding._channel._wire.arena.leases == 1

    def test_a_run_without_a_new_lend_has_the_same_answer(self, backend: IsolatedBackend) -> None:
        binding = bound(backend)
        for shape in ((1, 4), LARGE):
            x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
            first = ask(binding, x)[0]

            np.testing.assert_array_equal(first, binding.run((0,))[0])
            np.testing.assert_array_equal(first, binding.run((0,))[0])

    def test_bindings_that_are_let_go_of_end_over_there_too(self, backend: IsolatedBackend) -> None:
        def threads() -> int:
            return len(list(Path(f"/proc/{backend.pid}/task").iterdir()))

        before = threads(), descriptors()
        bindings = [bound(backend) for _ in range(5)]
        for binding in bindings:
            ask(binding, np.ones(LARGE, np.float32))
        held = threads() - before[0]
        del bindings, binding

        until(lambda: threads() <= before[0] and descriptors() <= before[1])
        assert held <= 5  # others that were let go of before may have just ended

    @given(
        st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3000)), min_size=1, max_size=4),
        st.lists(st.sampled_from((0, 1, 2)), max_size=4),
    )
    def test_whatever_shapes_follow_each_other_each_run_has_its_own_answer(
        self, backend: IsolatedBackend, shapes: list[tuple[int, int]], wanted: list[int]
    ) -> None:
        binding = bound(backend)
        kept = []
        for number, shape in enumerate(shapes):
            x = np.full(shape, number + 0.5, np.float32)
            outputs = ask(binding, x, 0, *wanted)
            assert len(outputs) == 1 + len(wanted)
            kept.append((x, outputs[0]))
        for x, y in kept:
            np.testing.assert_array_equal(x * 2, y)


@pytest.mark.slow
class TestFailures:
    @pytest.mark.parametrize(
        ("fault", "kind", "code", "message", "retry_after_ns"),
        [
            (Fault.REFUSE, InferError, Code.INVALID, "not this one", 5),
            (Fault.TOO_MUCH, OutOfMemory, Code.OVERLOADED, "too many rows", 3),
            (Fault.LOSE, DeviceLost, Code.NOT_READY, "the device is gone", 0),
            (Fault.STOP, RunStopped, Code.EXPIRED, "it was stopped", 0),
            (Fault.RAISE, InferError, Code.INTERNAL, "inference failed: ZeroDivisionError", 0),
            (Fault.LEAVE, InferError, Code.INTERNAL, "inference failed: SystemExit", 0),
            (Fault.NO_MEMORY, OutOfMemory, Code.OVERLOADED, "no memory in the model's process", 1_000_000_000),
            (Fault.COMPLEX, InferError, Code.INTERNAL, "inference failed: TypeError", 0),
        ],
    )
    def test_what_a_run_raises_is_raised_here_as_what_it_is_and_the_next_one_runs(
        self, backend: IsolatedBackend, fault: Fault, kind: type, code: Code, message: str, retry_after_ns: int
    ) -> None:
        binding = bound(backend)
        error = raised(ask, binding, row(fault, 1))

        assert (type(error), error.code, error.message, error.retry_after_ns) == (kind, code, message, retry_after_ns)
        assert ask(binding, row(1, 2))[0].tolist() == [[2, 4]]

    def test_an_output_that_is_no_tensor_is_refused(self, backend: IsolatedBackend) -> None:
        error = raised(ask, bound(backend), row(Fault.MAP))

        assert error.code is Code.UNSUPPORTED
        assert "no tensor, but a dict" in error.message

    def test_only_the_log_is_told_what_has_happened(
        self, backend: IsolatedBackend, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "penstock.workers")
        raised(ask, bound(backend), row(Fault.RAISE))

        until(lambda: any("what only the log is told" in message for message in caplog.messages))

    def test_a_binding_that_is_refused_says_why(self, backend: IsolatedBackend) -> None:
        assert raised(bound, backend, Fault.REFUSE).message == "no such Binding"
        assert ask(bound(backend), row(1))[0].tolist() == [[2]]

    def test_more_rows_than_its_capacity_are_refused(self, backend: IsolatedBackend) -> None:
        with pytest.raises(ValueError, match="9 rows exceed the capacity of 8"):
            bound(backend).acquire_buffers(9, [(9, 1)])

    def test_nothing_runs_that_was_not_lent(self, backend: IsolatedBackend) -> None:
        with pytest.raises(ValueError, match="run without acquire_buffers"):
            bound(backend).run((0,))


@pytest.mark.slow
class TestTheEndOfAWorker:
    def test_a_run_is_told_at_once_and_so_is_all_that_comes_after(self) -> None:
        with nothing_left(), faulty() as backend:
            binding = bound(backend)
            error = raised(ask, binding, row(Fault.DIE))
            after = raised(binding.acquire_buffers, 1, [(1, 1)])
            again = raised(bound, backend)

            assert [type(each) for each in (error, after, again)] == [DeviceLost] * 3
            assert error.message == after.message == again.message == "model 'faulty' ended: exit status 7"

    def test_all_runs_under_way_are_told(self) -> None:
        with nothing_left(), faulty() as backend, ThreadPoolExecutor(3) as pool:
            bindings = [bound(backend) for _ in range(3)]
            running = [pool.submit(raised, ask, binding, row(Fault.WAIT)) for binding in bindings]
            until(lambda: all(binding._running for binding in bindings))
            os.kill(backend.pid, signal.SIGKILL)
            errors = [each.result(PATIENCE_S) for each in running]

            assert [(type(each), each.message) for each in errors] == [
                (DeviceRemoved, "model 'faulty' ended: signal 9 (SIGKILL)")
            ] * 3

    def test_one_that_takes_too_much_memory_is_ended_and_the_run_told_why(self) -> None:
        with nothing_left(), faulty(**{"worker.memory_mb": 200}) as backend:
            error = raised(ask, bound(backend), row(Fault.GROW))

            assert isinstance(error, DeviceLost)
            assert "more than its limit of 200 MiB" in error.message

    def test_one_that_is_stopped_is_found_and_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By the signs of life that are asked of it: after 5 s without any, here less, and a second more."""
        monkeypatch.setattr(worker_module, "IDLE_S", 0.2)
        with nothing_left(), faulty() as backend:
            error = raised(ask, bound(backend), row(Fault.FREEZE))

            assert isinstance(error, DeviceLost)
            assert "was stopped for more than 1 s" in error.message

    def test_one_that_ends_while_it_binds_is_told_of(self) -> None:
        with nothing_left(), faulty() as backend:
            assert isinstance(raised(bound, backend, Fault.DIE), DeviceLost)

    def test_one_that_cannot_be_spoken_with_is_ended(self) -> None:
        with nothing_left(), faulty() as backend:
            pid = backend.pid
            assert isinstance(raised(ask, bound(backend), row(Fault.CLOSE)), DeviceLost)
            until(lambda: not lives(pid))

    def test_one_that_answers_what_was_not_asked_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with nothing_left(), faulty() as backend:
            binding = bound(backend)
            binding.acquire_buffers(1, [(1, 1)])[0][...] = 1  # type: ignore[index]
            send = binding._channel.send_allocated
            monkeypatch.setattr(
                binding._channel, "send_allocated", lambda kind, number, body, lent: send(kind, number + 1, body, lent)
            )
            error = raised(binding.run, (0,))
            monkeypatch.undo()

            assert isinstance(error, DeviceLost)
            assert error.message == "model 'faulty' was killed: it answered a call that was not made"


@pytest.mark.slow
class TestStopping:
    def run_until_stopped(self, binding: IsolatedBinding, fault: Fault, begun: Path, stops: int) -> InferError:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(raised, ask, binding, row(fault))
            until(begun.exists)
            for _ in range(stops):
                binding.stop()
            return running.result(PATIENCE_S)

    @pytest.mark.parametrize("on", [0, 1])
    def test_a_runtime_that_can_be_asked_is_asked(self, tmp_path: Path, on: int) -> None:
        begun = tmp_path / "begun"
        with nothing_left(), faulty(mark=begun, on=on) as backend:
            binding = bound(backend)
            error = self.run_until_stopped(binding, Fault.WAIT, begun, 1)

            assert (type(error), error.message) == (RunStopped, "stopped in time")
            assert ask(binding, row(1))[0].tolist() == [[1 if on else 2]]

    def test_a_run_that_is_stopped_before_it_begins_does_not_begin(self, backend: IsolatedBackend) -> None:
        binding = bound(backend)
        binding.acquire_buffers(1, [(1, 1)])[0][...] = 1  # type: ignore[index]
        binding.stop()

        assert raised(binding.run, (0,)).message == "the run was stopped"
        assert ask(binding, row(1))[0].tolist() == [[2]]

    def test_one_that_goes_on_ends_with_its_process_when_it_is_told_again(self, tmp_path: Path) -> None:
        begun = tmp_path / "begun"
        with nothing_left(), faulty(mark=begun) as backend:
            binding = bound(backend)
            error = self.run_until_stopped(binding, Fault.HANG, begun, 2)
            after = raised(binding.acquire_buffers, 1, [(1, 1)])

            assert type(error) is RunStopped
            assert type(after) is DeviceLost
            assert after.message == "model 'faulty' was killed: a run did not stop when requested"

    def test_a_run_that_takes_longer_than_its_limit_ends_with_its_process(self) -> None:
        with nothing_left(), faulty(**{"worker.timeout_s": 0.2}) as backend:
            binding = bound(backend)
            in_time = ask(binding, row(1))
            error = raised(ask, binding, row(Fault.HANG))
            until(lambda: not lives(backend.pid))

            assert in_time[0].tolist() == [[2]]
            assert (type(error), error.message) == (RunStopped, "model 'faulty': run exceeded its limit of 200 ms")
            assert type(raised(binding.acquire_buffers, 1, [(1, 1)])) is DeviceLost

    def test_stopping_what_does_not_run_ends_nothing(self, backend: IsolatedBackend) -> None:
        binding = bound(backend)
        for _ in range(5):
            binding.stop()
            ask(binding, row(1))
            binding.stop()
            binding.stop()

        assert ask(binding, row(1))[0].tolist() == [[2]]

    def test_two_bindings_run_at_once(self, backend: IsolatedBackend) -> None:
        bindings = [bound(backend) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(raised, ask, bindings[0], row(Fault.WAIT))
            until(lambda: bindings[0]._running)
            served = ask(bindings[1], row(3))[0].tolist()
            bindings[0].stop()

            assert served == [[6]]
            assert type(waiting.result(PATIENCE_S)) is RunStopped

    def test_a_backend_that_is_closed_while_a_binding_runs_ends_the_run(self) -> None:
        with nothing_left(), faulty() as backend, ThreadPoolExecutor(1) as pool:
            binding = bound(backend)
            running = pool.submit(raised, ask, binding, row(Fault.WAIT))
            until(lambda: binding._running)
            backend.close()

            assert isinstance(running.result(PATIENCE_S), DeviceLost)


class TestWhatIsWritten:
    @given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**32 - 1)))
    def test_a_run_is_read_as_it_was_written(self, rows: int, wanted: list[int]) -> None:
        assert read_run(write_run(rows, wanted)) == (rows, tuple(wanted))

    @given(
        st.sampled_from((InferError, OutOfMemory, DeviceLost, RunStopped)),
        st.sampled_from(Code),
        st.text(),
        st.integers(-1, 2**62),
    )
    def test_a_failure_is_read_as_it_was_written(
        self, kind: type[InferError], code: Code, message: str, retry_after_ns: int
    ) -> None:
        read = read_failure(write_failure(kind(code, message, retry_after_ns)))

        assert (type(read), read.code, read.message, read.retry_after_ns) == (kind, code, message, retry_after_ns)

    def test_a_class_of_the_users_own_is_read_as_what_it_is_one_of(self) -> None:
        class Other(OutOfMemory):
            pass

        assert type(read_failure(write_failure(Other(Code.OVERLOADED, "x")))) is OutOfMemory
