"""A worker's calls: their answers, their order, and their errors."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.workers.order import NotStartedError, WorkerLost
from penstock.server.workers.worker import Worker
from tests.server.workers.orders import CALL, HERE, ended, order, scene

pytestmark = pytest.mark.slow


def test_a_worker_opens_its_service_and_answers_in_order() -> None:
    async def work() -> list[Any]:
        worker = Worker(order())
        opened = await worker.ready
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        replies = await asyncio.gather(*[worker.call(CALL, b"echo %d" % number, [x]) for number in range(100)])
        assert all((reply[1][0] == x).all() for reply in replies)  # type: ignore[union-attr]
        await ended(worker)
        return [opened[0], *[reply[0] for reply in replies]]

    assert scene(work()) == [b"open", *[b"echo %d" % number for number in range(100)]]


def test_an_error_of_a_call_is_raised_to_its_caller_and_the_worker_continues() -> None:
    async def work() -> None:
        worker = Worker(order())
        refused = await asyncio.gather(
            *[worker.call(CALL, word) for word in (b"refuse too much", b"fail badly", b"leave", b"echo")],
            return_exceptions=True,
        )
        overloaded, failed, canceled, echoed = refused
        assert isinstance(overloaded, InferError)
        assert (overloaded.code, overloaded.message, overloaded.retry_after_ns) == (Code.OVERLOADED, "too much", 7)
        assert isinstance(failed, InferError)
        assert (failed.code, failed.message) == (Code.INTERNAL, "ValueError: badly")
        assert isinstance(canceled, InferError)
        assert canceled.message == "SystemExit: 3"
        assert echoed == (b"echo", [])
        await ended(worker)

    scene(work())


def test_an_unsupported_tensor_fails_only_its_own_call() -> None:
    async def work() -> None:
        worker = Worker(order())
        with pytest.raises(TypeError):
            worker.call(CALL, b"", [np.zeros(1, np.complex64)])
        assert (await worker.call(CALL, b"echo"))[0] == b"echo"
        await ended(worker)

    scene(work())


def test_a_worker_runs_with_its_folder_path_and_environment(tmp_path: Path) -> None:
    async def work() -> bytes:
        worker = Worker(order(folder=tmp_path, environment={"MARK": "here"}, path=(HERE, str(tmp_path))))
        reply = await worker.call(CALL, b"place")
        await ended(worker)
        return reply[0]

    assert scene(work()).decode() == f"{tmp_path} {HERE} here {sys.executable}"


def test_submodules_of_a_standard_package_can_be_used_when_only_the_package_is_imported() -> None:
    async def work() -> None:
        worker = Worker(order())
        assert (await worker.call(CALL, b"submodule request"))[0] == b"urllib.request"
        with pytest.raises(InferError, match="AttributeError: module 'urllib' has no attribute 'reqest'"):
            await worker.call(CALL, b"submodule reqest")
        await ended(worker)

    scene(work())


def test_a_worker_starts_with_pythonsafepath_and_pythonpath_of_the_server() -> None:
    async def work() -> None:
        worker = Worker(order(path=(), environment={"PYTHONSAFEPATH": "1", "PYTHONPATH": HERE}))
        assert (await worker.ready)[0] == b"open"
        await ended(worker)

    scene(work())


@pytest.mark.parametrize("name", ["logging", "string", "ssl", "subprocess", "concurrent"])
def test_a_user_file_named_like_a_standard_module_does_not_shadow_the_module(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is the model, not the library')\n")

    async def work() -> None:
        worker = Worker(
            order(path=(str(tmp_path), HERE))
        )  # the service imports asyncio, which imports all of these modules
        assert (await worker.call(CALL, b"echo"))[0] == b"echo"
        await ended(worker)

    scene(work())


def test_child_processes_do_not_inherit_the_socket_or_the_memory_of_a_worker() -> None:
    async def work() -> bytes:
        worker = Worker(order())
        reply = await worker.call(CALL, b"descriptors")
        await ended(worker)
        return reply[0]

    # its standard streams, the socket, the mapped memory, and the folder being listed
    assert len(scene(work()).split()) == 6


def test_a_canceled_call_runs_and_its_answer_is_freed() -> None:
    async def work() -> None:
        worker = Worker(order())
        await worker.ready
        large = np.zeros(600_000, np.uint8)
        for _ in range(20):
            call = worker.call(CALL, b"echo", [large])
            await asyncio.sleep(0)
            call.cancel()
            reply = await worker.call(CALL, b"echo", [large])
            assert reply[1][0] is not None
            del reply
        gc.collect()
        await worker.call(CALL, b"echo")
        assert worker.in_flight_count == 0
        await worker.call(CALL, b"echo")
        assert worker._link.arena.leases == 0
        await ended(worker)

    scene(work())


def test_a_message_during_a_call_reaches_a_listening_service() -> None:
    async def work() -> bytes:
        worker = Worker(order(settings={"listens": True}))
        hearing = worker.call(CALL, b"hear")
        await worker.ready
        worker.send_message(64, 0, b"now")
        reply = await hearing
        await ended(worker)
        return reply[0]

    assert scene(work()) == b"now"


def test_a_message_before_the_opening_is_delivered_after_the_opening() -> None:
    async def work() -> bytes:
        worker = Worker(order())
        worker.send_message(64, 0, b"early")
        reply = await worker.call(CALL, b"hear")
        await ended(worker)
        return reply[0]

    assert scene(work()) == b"early"


def test_a_message_of_the_service_arrives_before_its_reply() -> None:
    async def work() -> list[Any]:
        messages: list[Any] = []
        worker = Worker(order(), on_message=lambda kind, number, body, arrays: messages.append((kind, number, body)))
        await worker.call(CALL, b"say hello")
        await ended(worker)
        return messages

    assert scene(work()) == [(64, 5, b"hello")]


def test_a_service_on_a_loop_keeps_its_tasks_between_calls() -> None:
    async def work() -> None:
        worker = Worker(order(settings={"loop": True}))
        await worker.call(CALL, b"tick")
        assert (await worker.call(CALL, b"ticked"))[0] == b"ticked"
        hearing = worker.call(CALL, b"heard")
        worker.send_message(64, 0, b"told")
        assert (await hearing)[0] == b"told"
        with pytest.raises(InferError, match="ValueError: badly"):
            await worker.call(CALL, b"fail badly")
        assert (await worker.call(CALL, b"echo"))[0] == b"echo"
        await ended(worker)
        assert worker.end_reason == "exit"

    scene(work())


def test_stopping_a_worker_finishes_the_calls_in_flight() -> None:
    async def work() -> None:
        lost: list[Worker] = []
        worker = Worker(order(), lost.append)
        calls = [worker.call(CALL, b"echo") for _ in range(3)]
        worker.stop()
        with pytest.raises(NotStartedError):
            worker.call(CALL)
        assert [body for body, _ in await asyncio.gather(*calls)] == [b"echo"] * 3
        await worker.ended
        assert not lost

    scene(work())


class TestOpening:
    """A worker that cannot be opened reports the reason and ends."""

    def refused(self, code: Code, **members: Any) -> str:
        async def work() -> str:
            lost: list[Worker] = []
            worker = Worker(order(**members), lost.append)
            later = worker.call(CALL, b"echo")
            with pytest.raises(InferError) as caught:
                await worker.ready
            with pytest.raises(NotStartedError):
                await later
            await worker.ended
            assert lost == [worker]
            assert worker.end_reason == "open"
            assert not worker.serving
            assert caught.value.code is code
            return caught.value.message

        return scene(work())

    def test_a_missing_interpreter_is_an_error(self) -> None:
        text = self.refused(Code.INVALID, interpreter="/nowhere/python")
        assert text == "the test's worker: Python '/nowhere/python' cannot be used: No such file or directory"

    def test_a_non_executable_interpreter_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "python").write_text("?")
        text = self.refused(Code.INVALID, interpreter=str(tmp_path / "python"))
        assert text == f"the test's worker: Python '{tmp_path}/python' cannot be used: Permission denied"

    def test_a_missing_folder_is_an_error(self) -> None:
        text = self.refused(Code.INVALID, folder=Path("/nowhere"))
        assert text == "the test's worker: folder '/nowhere' cannot be used: No such file or directory"

    def test_an_interpreter_without_numpy_is_an_error(self, tmp_path: Path) -> None:
        bare = tmp_path / "python"
        bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        bare.chmod(0o755)
        text = self.refused(Code.INVALID, interpreter=str(bare), environment={"PYTHONPATH": ""})
        assert text == f"the test's worker: Python '{sys.executable}' has no module 'numpy', which workers require"

    def test_an_interpreter_that_is_not_python_is_an_error(self) -> None:
        text = self.refused(Code.NOT_READY, interpreter="/bin/false")
        assert text == "the test's worker ended while it was starting: exit status 1"

    def test_a_missing_service_is_an_error(self) -> None:
        assert self.refused(Code.INTERNAL, service="nowhere") == "ModuleNotFoundError: No module named 'nowhere'"

    def test_an_infer_error_of_the_service_is_raised_unchanged(self) -> None:
        assert self.refused(Code.INVALID, settings={"raises": "no such model"}) == "no such model"

    def test_an_exception_of_the_service_is_an_internal_error(self) -> None:
        assert self.refused(Code.INTERNAL, settings={"breaks": "x"}) == "KeyError: 'x'"

    def test_a_service_that_ends_its_process_is_an_error(self) -> None:
        text = self.refused(Code.NOT_READY, settings={"exits": 4})
        assert text == "the test's worker ended while it was starting: exit status 4"

    def test_a_service_that_does_not_open_in_time_is_killed(self) -> None:
        async def work() -> None:
            worker = Worker(order(settings={"hangs": True}, open_limit_s=0.3))
            with pytest.raises(WorkerLost, match=r"opening took longer than its limit of 0\.3 s") as caught:
                await worker.ready
            assert caught.value.code is Code.EXPIRED
            await worker.ended
            assert worker.end_reason == "time"

        scene(work())

    @pytest.mark.parametrize(
        ("what", "error"),
        [
            ("os.pipe", OSError(24, "Too many open files")),
            ("threading.Thread.start", RuntimeError("can't start new thread")),
        ],
    )
    def test_a_worker_without_descriptors_or_threads_left_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch, what: str, error: Exception
    ) -> None:
        def refuse(*_: Any) -> None:
            raise error

        async def work() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(what, refuse)
                with pytest.raises(InferError, match="no worker could be started") as caught:
                    Worker(order())
            assert caught.value.message.endswith(str(error))

        scene(work())


def test_callbacks_of_calls_are_called_once_and_in_order_however_the_calls_end() -> None:
    async def work() -> list[tuple[bytes, str]]:
        worker = Worker(order())
        await worker.ready
        notices: list[tuple[bytes, str]] = []

        def answered(body: bytes, _arrays: list[Any], error: Exception | None) -> None:
            notices.append((body, type(error).__name__))

        for word in (b"echo 1", b"refuse too much", b"echo 2", b"kill", b"echo 3"):
            worker.send_call(answered, CALL, word)
        assert not notices  # never in the turn of the loop in which the call is sent
        await worker.ended
        with pytest.raises(NotStartedError):
            worker.send_call(answered, CALL, b"echo 4")
        return notices

    ends = scene(work())
    assert ends == [
        (b"echo 1", "NoneType"), (b"", "InferError"), (b"echo 2", "NoneType"), (b"", "WorkerLost"),
        (b"", "NotStartedError"),
    ]  # fmt: skip
