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
from penstock.server.isolated.messages import read_failure, read_run, write_failure, write_run
from penstock.server.workers import worker as worker_module
from tests.processes import descriptors, lives
from tests.server.isolated.faulty_backend import Fault
from tests.server.isolated.stage import PATIENCE_S, faulty, nothing_left, until

LARGE = (2, 75_000)
"""600 kB."""


def bound(backend: IsolatedBackend, capacity_rows: int = 8) -> IsolatedBinding:
    binding = backend.bind(replace(backend.graph, batched=True), capacity_rows)
    assert isinstance(binding, IsolatedBinding)
    return binding


def ask(binding: IsolatedBinding, x: Array, *positions: int) -> list[Any]:
    (buffer,) = binding.acquire_buffers(len(x), [x.shape])
    assert buffer is not None
    buffer[...] = x
    return binding.run(positions or (0,))


def row(*values: float) -> Array:
    return np.array([values], np.float32)


def raised(work: Callable[..., Any], *args: Any) -> InferError:
    with pytest.raises(InferError) as caught:
        work(*args)
    return caught.value


@pytest.fixture(scope="module")
def backend() -> Iterator[IsolatedBackend]:
    """Yield a Backend whose worker is never ended."""
    with faulty() as isolated:
        yield isolated


def base_of(array: Array) -> Any:
    """Return the object that owns an array's memory."""
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base


@pytest.mark.slow
class TestMemory:
    def test_large_tensors_are_filled_and_read_in_shared_memory(self, backend: IsolatedBackend) -> None:
        binding = bound(backend)
        x = np.arange(np.prod(LARGE), dtype=np.float32).reshape(LARGE)

        (buffer,) = binding.acquire_buffers(2, [LARGE])
        assert buffer is not None
        buffer[...] = x
        (y,) = binding.run((0,))

        np.testing.assert_array_equal(x * 2, y)
        # both are shared memory: the worker reads what was filled, and this process reads what the worker wrote
        assert "mmap" in type(base_of(buffer)).__name__
        assert type(base_of(y)).__name__ == "Slot"

    def test_a_runtime_with_run_on_gets_large_tensors_at_aligned_addresses(self) -> None:
        with faulty(on=1) as backend:
            y, place = ask(bound(backend), np.ones(LARGE, np.float32), 0, 1)

            assert place[0] == 0
            np.testing.assert_array_equal(np.ones(LARGE), y)

    def test_an_output_outlives_its_binding_its_worker_and_many_runs(self) -> None:
        with faulty() as backend:
            binding = bound(backend)
            outputs = [ask(binding, np.full(LARGE, value, np.float32))[0] for value in range(5)]
            os.kill(backend.pid, signal.SIGKILL)
            del binding
        assert [set(np.unique(each).tolist()) for each in outputs] == [{2.0 * value} for value in range(5)]
        outputs[0][...] = 7  # the caller owns it
        assert outputs[1][0, 0] == 2.0

    def test_many_runs_reuse_the_slots_of_the_arena(self, backend: IsolatedBackend) -> None:
        binding = bound(backend)
        for _ in range(50):
            ask(binding, np.ones(LARGE, np.float32))

        assert binding._channel._wire.arena.total_bytes <= 4 << 20

    def test_buffers_acquired_without_a_run_are_reused(self, backend: IsolatedBackend) -> None:
        binding = bound(backend)
        for _ in range(50):
            binding.acquire_buffers(2, [LARGE])

        assert binding._channel._wire.arena.leases == 1

    def test_a_run_without_new_buffers_has_the_same_answer(self, backend: IsolatedBackend) -> None:
        binding = bound(backend)
        for shape in ((1, 4), LARGE):
            x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
            first = ask(binding, x)[0]

            np.testing.assert_array_equal(first, binding.run((0,))[0])
            np.testing.assert_array_equal(first, binding.run((0,))[0])

    def test_released_bindings_end_their_threads_in_the_worker(self, backend: IsolatedBackend) -> None:
        def threads() -> int:
            return len(list(Path(f"/proc/{backend.pid}/task").iterdir()))

        before = threads(), descriptors()
        bindings = [bound(backend) for _ in range(5)]
        for binding in bindings:
            ask(binding, np.ones(LARGE, np.float32))
        held = threads() - before[0]
        del bindings, binding

        until(lambda: threads() <= before[0] and descriptors() <= before[1])
        assert held <= 5  # bindings released earlier may have just ended

    @given(
        st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3000)), min_size=1, max_size=4),
        st.lists(st.sampled_from((0, 1, 2)), max_size=4),
    )
    def test_runs_of_any_shapes_in_a_row_have_their_own_answers(
        self, backend: IsolatedBackend, shapes: list[tuple[int, int]], more_positions: list[int]
    ) -> None:
        binding = bound(backend)
        runs = []
        for number, shape in enumerate(shapes):
            x = np.full(shape, number + 0.5, np.float32)
            outputs = ask(binding, x, 0, *more_positions)
            assert len(outputs) == 1 + len(more_positions)
            runs.append((x, outputs[0]))
        for x, y in runs:
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
    def test_a_failed_run_raises_its_error_type_and_the_next_run_succeeds(
        self, backend: IsolatedBackend, fault: Fault, kind: type, code: Code, message: str, retry_after_ns: int
    ) -> None:
        binding = bound(backend)
        error = raised(ask, binding, row(fault, 1))

        assert (type(error), error.code, error.message, error.retry_after_ns) == (kind, code, message, retry_after_ns)
        assert ask(binding, row(1, 2))[0].tolist() == [[2, 4]]

    def test_an_output_that_is_not_a_tensor_is_rejected(self, backend: IsolatedBackend) -> None:
        error = raised(ask, bound(backend), row(Fault.MAP))

        assert error.code is Code.UNSUPPORTED
        assert "no tensor, but a dict" in error.message

    def test_the_details_of_a_failed_run_are_only_logged(
        self, backend: IsolatedBackend, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "penstock.workers")
        raised(ask, bound(backend), row(Fault.RAISE))

        until(lambda: any("what only the log is told" in message for message in caplog.messages))

    def test_a_failed_bind_raises_the_error_of_the_worker(self, backend: IsolatedBackend) -> None:
        assert raised(bound, backend, Fault.REFUSE).message == "no such Binding"
        assert ask(bound(backend), row(1))[0].tolist() == [[2]]

    def test_more_rows_than_the_capacity_of_a_binding_are_rejected(self, backend: IsolatedBackend) -> None:
        with pytest.raises(ValueError, match="9 rows exceed the capacity of 8"):
            bound(backend).acquire_buffers(9, [(9, 1)])

    def test_a_run_without_acquired_buffers_is_rejected(self, backend: IsolatedBackend) -> None:
        with pytest.raises(ValueError, match="run without acquire_buffers"):
            bound(backend).run((0,))


@pytest.mark.slow
class TestWorkerEnds:
    def test_all_calls_fail_immediately_after_a_run_ends_the_worker(self) -> None:
        with nothing_left(), faulty() as backend:
            binding = bound(backend)
            error = raised(ask, binding, row(Fault.DIE))
            after = raised(binding.acquire_buffers, 1, [(1, 1)])
            again = raised(bound, backend)

            assert [type(each) for each in (error, after, again)] == [DeviceLost] * 3
            assert error.message == after.message == again.message == "model 'faulty' ended: exit status 7"

    def test_all_runs_in_progress_fail_when_the_worker_is_killed(self) -> None:
        with nothing_left(), faulty() as backend, ThreadPoolExecutor(3) as pool:
            bindings = [bound(backend) for _ in range(3)]
            running = [pool.submit(raised, ask, binding, row(Fault.WAIT)) for binding in bindings]
            until(lambda: all(binding._running for binding in bindings))
            os.kill(backend.pid, signal.SIGKILL)
            errors = [each.result(PATIENCE_S) for each in running]

            assert [(type(each), each.message) for each in errors] == [
                (DeviceRemoved, "model 'faulty' ended: signal 9 (SIGKILL)")
            ] * 3

    def test_a_worker_above_its_memory_limit_is_killed_with_a_reason(self) -> None:
        with nothing_left(), faulty(**{"worker.memory_mb": 200}) as backend:
            error = raised(ask, bound(backend), row(Fault.GROW))

            assert isinstance(error, DeviceLost)
            assert "more than its limit of 200 MiB" in error.message

    def test_a_stopped_worker_is_detected_and_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is pinged after 5 s of silence, here less, and killed a second later."""
        monkeypatch.setattr(worker_module, "IDLE_S", 0.2)
        with nothing_left(), faulty() as backend:
            error = raised(ask, bound(backend), row(Fault.FREEZE))

            assert isinstance(error, DeviceLost)
            assert "was stopped for more than 1 s" in error.message

    def test_a_bind_that_ends_the_worker_is_a_lost_device(self) -> None:
        with nothing_left(), faulty() as backend:
            assert isinstance(raised(bound, backend, Fault.DIE), DeviceLost)

    def test_a_worker_that_closes_its_sockets_is_killed(self) -> None:
        with nothing_left(), faulty() as backend:
            pid = backend.pid
            assert isinstance(raised(ask, bound(backend), row(Fault.CLOSE)), DeviceLost)
            until(lambda: not lives(pid))

    def test_a_worker_that_answers_an_unknown_call_is_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def test_a_runtime_that_can_stop_a_run_stops_it(self, tmp_path: Path, on: int) -> None:
        begun = tmp_path / "begun"
        with nothing_left(), faulty(mark=begun, on=on) as backend:
            binding = bound(backend)
            error = self.run_until_stopped(binding, Fault.WAIT, begun, 1)

            assert (type(error), error.message) == (RunStopped, "stopped in time")
            assert ask(binding, row(1))[0].tolist() == [[1 if on else 2]]

    def test_a_run_stopped_before_it_starts_does_not_start(self, backend: IsolatedBackend) -> None:
        binding = bound(backend)
        binding.acquire_buffers(1, [(1, 1)])[0][...] = 1  # type: ignore[index]
        binding.stop()

        assert raised(binding.run, (0,)).message == "the run was stopped"
        assert ask(binding, row(1))[0].tolist() == [[2]]

    def test_a_run_that_ignores_a_stop_is_killed_at_the_second_stop(self, tmp_path: Path) -> None:
        begun = tmp_path / "begun"
        with nothing_left(), faulty(mark=begun) as backend:
            binding = bound(backend)
            error = self.run_until_stopped(binding, Fault.HANG, begun, 2)
            after = raised(binding.acquire_buffers, 1, [(1, 1)])

            assert type(error) is RunStopped
            assert type(after) is DeviceLost
            assert after.message == "model 'faulty' was killed: a run did not stop when requested"

    def test_a_run_above_its_time_limit_is_killed_with_its_process(self) -> None:
        with nothing_left(), faulty(**{"worker.timeout_s": 0.2}) as backend:
            binding = bound(backend)
            in_time = ask(binding, row(1))
            error = raised(ask, binding, row(Fault.HANG))
            until(lambda: not lives(backend.pid))

            assert in_time[0].tolist() == [[2]]
            assert (type(error), error.message) == (RunStopped, "model 'faulty': run exceeded its limit of 200 ms")
            assert type(raised(binding.acquire_buffers, 1, [(1, 1)])) is DeviceLost

    def test_stopping_an_idle_binding_does_nothing(self, backend: IsolatedBackend) -> None:
        binding = bound(backend)
        for _ in range(5):
            binding.stop()
            ask(binding, row(1))
            binding.stop()
            binding.stop()

        assert ask(binding, row(1))[0].tolist() == [[2]]

    def test_two_bindings_run_in_parallel(self, backend: IsolatedBackend) -> None:
        bindings = [bound(backend) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(raised, ask, bindings[0], row(Fault.WAIT))
            until(lambda: bindings[0]._running)
            served = ask(bindings[1], row(3))[0].tolist()
            bindings[0].stop()

            assert served == [[6]]
            assert type(waiting.result(PATIENCE_S)) is RunStopped

    def test_closing_a_backend_ends_a_run_in_progress(self) -> None:
        with nothing_left(), faulty() as backend, ThreadPoolExecutor(1) as pool:
            binding = bound(backend)
            running = pool.submit(raised, ask, binding, row(Fault.WAIT))
            until(lambda: binding._running)
            backend.close()

            assert isinstance(running.result(PATIENCE_S), DeviceLost)


class TestSerialization:
    @given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**32 - 1)))
    def test_a_run_is_read_as_it_was_written(self, rows: int, positions: list[int]) -> None:
        assert read_run(write_run(rows, positions)) == (rows, tuple(positions))

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

    def test_a_subclass_of_an_error_is_read_as_its_base_class(self) -> None:
        class Other(OutOfMemory):
            pass

        assert type(read_failure(write_failure(Other(Code.OVERLOADED, "x")))) is OutOfMemory
