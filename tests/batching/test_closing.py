"""Closing: closing a model whose device hangs times out, and the model is freed when the device responds after all."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.batching.loading import closing
from tests.batching.overlapping_device import ROWS, Stream, opened
from tests.fakes import PATIENCE_S, no_more_threads


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "END_TIMEOUT_S", 0.01)


def same(inputs: list[Any]) -> list[Any]:
    return inputs


def test_closing_a_model_does_not_block_on_a_kernel_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream(ROWS, same, held=True)
    with opened(stream) as house:
        house.put(1)
        stream.wait_begun()

        house.model.close()

        assert not stream.closed
        assert "has not responded" in caplog.text
        stream.let_end()
        house.next()
        for thread in threading.enumerate():
            if thread.name == "m ends":
                thread.join(PATIENCE_S)
        assert stream.closed


def test_closing_a_model_does_not_block_on_a_device_that_hangs_while_freeing_memory() -> None:
    answers = threading.Event()

    class Hanging(Stream):
        def close(self) -> None:
            answers.wait(PATIENCE_S)
            super().close()

    stream = Hanging(ROWS, same)
    with opened(stream) as house:
        house.model.close()

        assert not stream.closed
        answers.set()


def test_without_a_free_thread_closing_waits_for_a_gpu_on_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[str] = []
    no_more_threads(monkeypatch)
    closing.end_with_timeout("m", ["cuda:0"], lambda: where.append(threading.current_thread().name))

    assert where == [threading.current_thread().name]


def test_a_cpu_is_closed_on_the_calling_thread_and_a_gpu_on_its_own_thread() -> None:
    where: list[str] = []
    for devices in ([], ["cpu", "cpu"], ["cpu", "cuda:0"]):
        closing.end_with_timeout("m", devices, lambda: where.append(threading.current_thread().name))

    assert where == [threading.current_thread().name] * 2 + ["m ends"]
