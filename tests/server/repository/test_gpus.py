"""Which GPUs the machine has, and the default device of a model that does not name one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.cuda import CudaError, Runtime
from penstock.server.options.gpu_settings import parse_devices, parse_limits
from penstock.server.repository.gpus import Gpus, GpuSources


def runtime(*capabilities: str, error: Exception | None = None) -> Runtime:
    """Make a runtime with one GPU per capability."""

    def count() -> int:
        if error is not None:
            raise error
        return len(capabilities)

    return cast(Runtime, SimpleNamespace(device_count=count, capability=lambda number: capabilities[number]))


def machine(found: Runtime | None, *, cuda: bool = True, shown: bool = True, why: str = "no driver") -> GpuSources:
    return GpuSources(lambda: found, lambda: why, lambda: cuda, lambda: shown)


class TestNumbers:
    def test_gpus_below_the_minimum_compute_capability_are_left_out(self, caplog: pytest.LogCaptureFixture) -> None:
        gpus = Gpus(min_capability=8.0, sources=machine(runtime("7.5", "9.0", "10.0", "8.0")))

        assert gpus.numbers == (1, 2, 3)
        assert gpus.reason == "GPU 0 has compute capability 7.5, below the minimum of 8"
        assert [record.getMessage() for record in caplog.records] == [gpus.reason]

    def test_without_a_driver_there_are_no_gpus(self) -> None:
        gpus = Gpus(sources=machine(None, shown=False))

        assert (gpus.numbers, gpus.reason) == ((), "no driver")

    def test_the_gpus_are_unknown_when_the_kernel_shows_some_but_there_is_no_runtime(self) -> None:
        assert Gpus(sources=machine(None)).numbers is None

    @pytest.mark.parametrize(
        "error", [CudaError(35, "cudaGetDeviceCount", "too old"), AttributeError("too old")], ids=["CUDA", "library"]
    )
    def test_a_driver_that_fails_leaves_no_gpus_and_a_reason(self, error: Exception) -> None:
        gpus = Gpus(sources=machine(runtime(error=error)))

        assert gpus.numbers == ()
        assert "too old" in gpus.reason

    def test_a_gpu_that_does_not_respond_is_left_out(self, caplog: pytest.LogCaptureFixture) -> None:
        def capability(number: int) -> str:
            if number == 1:
                raise CudaError(46, "cudaDeviceGetAttribute", "is unavailable")
            return "9.0"

        counted = cast(Runtime, SimpleNamespace(device_count=lambda: 3, capability=capability))
        gpus = Gpus(sources=machine(counted))

        assert gpus.numbers == (0, 2)
        assert "GPU 1 does not respond: cudaDeviceGetAttribute" in caplog.text

    def test_a_driver_that_hangs_times_out(self, caplog: pytest.LogCaptureFixture) -> None:
        answer = threading.Event()
        hanging = SimpleNamespace(device_count=lambda: 0 if answer.wait() else 1)
        gpus = Gpus(sources=machine(cast(Runtime, hanging)), timeout_s=0.001)

        assert gpus.numbers == ()
        assert gpus.reason == "the NVIDIA driver has not responded for 0.001 s"
        assert "no GPU is used until the server is restarted" in caplog.text
        answer.set()

    def test_the_driver_is_queried_once_and_only_on_demand(self) -> None:
        queries: list[int] = []

        def count() -> int:
            queries.append(1)
            return 1

        counting = SimpleNamespace(device_count=count, capability=lambda number: "9.0")
        gpus = Gpus(sources=machine(cast(Runtime, counting)))
        before = list(queries)
        found = [gpus.numbers, gpus.numbers]

        assert (before, queries, found) == ([], [1], [(0,), (0,)])


class TestDefaultDevices:
    @pytest.mark.parametrize(
        ("backend", "devices"),
        [("onnxruntime", ("cuda:0", "cuda:1")), ("python", ("cuda:0", "cuda:1")), ("tensorflow", ("cpu",))],
    )
    def test_the_default_is_every_gpu_that_the_backend_can_use(self, backend: str, devices: tuple[str, ...]) -> None:
        assert Gpus(sources=machine(runtime("9.0", "9.0"))).default(backend) == devices

    def test_the_default_is_the_cpu_with_one_warning_when_no_gpu_can_be_used(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        gpus = Gpus(sources=machine(None, shown=False))
        found = [gpus.default("onnxruntime"), gpus.default("onnxruntime"), gpus.default("python")]

        assert found == [("cpu",)] * 3
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "none can be used: no driver. Models that do not name a GPU run on the CPU" in caplog.text

    def test_configured_devices_are_the_default(self) -> None:
        assert Gpus(("cuda:1",), sources=machine(None)).default("tensorflow") == ("cuda:1",)

    def test_an_onnx_runtime_without_cuda_is_logged_once_and_the_driver_is_not_queried(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def never() -> Any:
            raise AssertionError("the driver was asked")

        gpus = Gpus(sources=GpuSources(never, str, lambda: False, lambda: True))
        found = [gpus.default("onnxruntime"), gpus.default("onnxruntime")]

        assert found == [("cpu",), ("cpu",)]
        assert len(caplog.records) == 1
        assert "pip install 'penstock[gpu]'" in caplog.text

    def test_nothing_is_logged_on_a_machine_without_a_gpu(self, caplog: pytest.LogCaptureFixture) -> None:
        assert Gpus(sources=machine(None, cuda=False, shown=False)).default("onnxruntime") == ("cpu",)
        assert caplog.records == []


def test_the_default_devices_of_this_machine_can_be_found() -> None:
    assert isinstance(Gpus().default("onnxruntime"), tuple)


class TestSettings:
    @pytest.mark.parametrize(
        ("text", "devices"),
        [
            ("auto", ()),
            ("cpu", ("cpu",)),
            ("cuda:0, cuda:12", ("cuda:0", "cuda:12")),
            ("cpu,cuda:0", ("cpu", "cuda:0")),
        ],
    )
    def test_valid_device_lists_are_parsed(self, text: str, devices: tuple[str, ...]) -> None:
        assert parse_devices(text) == devices

    @pytest.mark.parametrize("text", ["", "gpu", "cuda", "cuda:01", "cpu,cpu", "auto,cpu", "cuda:0;cuda:1"])
    def test_invalid_device_lists_are_rejected(self, text: str) -> None:
        with pytest.raises(ValueError, match="must be auto, cpu, or distinct devices such as cuda:0,cuda:1"):
            parse_devices(text)

    def test_valid_memory_limits_are_parsed(self) -> None:
        assert parse_limits(["0:0.8", " 2 : 1", "0:.5"]) == {0: 0.5, 2: 1.0}

    @pytest.mark.parametrize("text", ["0", "0:", ":1", "0:1.1", "-1:0.5", "0:x", "0:0.5:1"])
    def test_invalid_memory_limits_are_rejected(self, text: str) -> None:
        with pytest.raises(ValueError, match="option format is '<device id>:<fraction>'. Got " + text):
            parse_limits([text])

    @settings(max_examples=60)
    @given(st.text(st.sampled_from("autocpd:,.0129 -e"), max_size=12))
    @pytest.mark.parametrize("parse", [parse_devices, lambda text: parse_limits([text])], ids=["devices", "limits"])
    def test_any_text_is_parsed_or_rejected_with_a_message_that_quotes_it(
        self, parse: Callable[[str], Any], text: str
    ) -> None:
        message = ""
        try:
            parse(text)
        except ValueError as error:
            message = str(error)

        assert not message or text in message or repr(text) in message
