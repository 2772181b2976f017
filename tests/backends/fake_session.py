"""ONNX Runtime on a fake device: a real session on the CPU that runs when the device's stream reaches it.

`fake_cuda_loader` returns a Loader for the Engine: "cuda:0" and "cuda:1" are fake, "cpu" is real.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime

from penstock.backends import onnx
from penstock.backends.backend import Backend, Loader, device_number
from penstock.backends.cuda import Runtime
from penstock.backends.onnx_cuda import load_on_gpu
from penstock.backends.onnx_providers import CPU, CUDA
from tests.backends.fake_cuda import FakeRuntime

WARM_UP_RUNS = 2
"""So often ONNX Runtime runs what it is to capture, before it does."""
NO_GRAPH = "-1"
LATE = frozenset({"Add", "Cast", "Concat", "Gemm", "Identity", "MatMul", "Mul", "ReduceSum", "Relu", "Softmax", "Sub"})
"""Nodes whose failures a device would only tell late; a model of these alone computes when its stream gets there."""


@dataclass
class FakeGround:
    """Implements `onnx_cuda.Dependencies`.

    `on_host`: tensors that the session reads or makes on the host. `cpu_nodes`: operators that it leaves on the CPU.
    `fails`: the error of creating a session. `starts`: whether the provider starts. `eager`: runs wait for what they
    compute; None: only runs of a model with nodes other than LATE do. `capturing` is called in the middle of a capture.
    `takes`: the memory that a session takes; 0: as much as its file.
    """

    device_runtime: FakeRuntime
    on_host: Collection[str] = ()
    cpu_nodes: Collection[str] = ()
    fails: Callable[[Mapping[str, str]], Exception | None] = lambda options: None
    starts: bool = True
    eager: bool | None = None
    capturing: Callable[[], None] = lambda: None
    takes: int = 0
    sessions: weakref.WeakSet[FakeSession] = field(default_factory=weakref.WeakSet)
    providers: list[Sequence[tuple[str, dict[str, str]]]] = field(default_factory=list)
    session_options: list[Any] = field(default_factory=list)

    def runtime(self) -> Runtime:
        return self.device_runtime

    def create_session(self, model: str | bytes, options: Any, providers: Sequence[tuple[str, dict[str, str]]]) -> Any:
        self.providers.append(providers)
        self.session_options.append(options)
        error = self.fails(providers[-1][1])
        if error is not None:
            raise error
        real = onnxruntime.InferenceSession(model, options, providers=[CPU], enable_fallback=0)
        size = self.takes or (Path(model).stat().st_size if isinstance(model, str) else len(model))
        session = FakeSession(real, self, providers, size)
        self.sessions.add(session)
        return session


class FakeBinding:
    """Replaces an IOBinding: names and addresses."""

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[Any, ...]] = {}
        self.outputs: dict[str, tuple[Any, ...]] = {}

    def bind_input(self, name: str, *rest: Any) -> None:
        self.inputs[name] = rest

    def bind_output(self, name: str, *rest: Any) -> None:
        self.outputs[name] = rest


class FakeSession:
    """A session that takes addresses on the fake device."""

    def __init__(
        self, real: Any, ground: FakeGround, providers: Sequence[tuple[str, dict[str, str]]], size: int
    ) -> None:
        self._real = real
        self._ground = ground
        self._runtime = ground.device_runtime
        options = providers[-1][1]
        self._device = int(options["device_id"])
        self._stream = int(options["user_compute_stream"])
        self._graphs = options["enable_cuda_graph"] == "1"
        self._names = [name for name, _ in providers]
        self._captured_graphs: dict[tuple[int, str], Callable[[], None]] = {}
        self.captures: list[str] = []
        self.replays: list[str] = []
        self.shrunk = 0
        nodes = {node.op_type for part in real.get_provider_graph_assignment_info() for node in part.get_nodes()}
        self._eager = not nodes <= LATE if ground.eager is None else ground.eager
        self._runtime.take(size, self._device)
        weakref.finalize(self, self._runtime.take, -size, self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_providers(self) -> list[str]:
        return [*self._names, CPU] if self._ground.starts else [CPU]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        parts = self._real.get_provider_graph_assignment_info()
        return [_Part(self._ground, part) for part in parts]

    def get_input_memory_infos(self) -> list[Any]:
        return [_Place(self._ground, node.name) for node in self._real.get_inputs()]

    def get_output_memory_infos(self) -> list[Any]:
        return [_Place(self._ground, node.name) for node in self._real.get_outputs()]

    def io_binding(self) -> FakeBinding:
        return FakeBinding()

    def run(self, names: Sequence[str], feeds: Mapping[str, Any], options: Any) -> Any:
        if _entry(options, "memory.enable_memory_arena_shrinkage") == f"gpu:{self._device}":
            self.shrunk += 1
            options = onnxruntime.RunOptions()
        return self._now(lambda: self._real.run(names, feeds, options))

    def run_with_ort_values(self, names: Sequence[str], feeds: Mapping[str, Any], options: Any) -> Any:
        return self._now(lambda: self._real.run_with_ort_values(names, feeds, options))

    def run_with_iobinding(self, binding: FakeBinding, options: Any) -> None:
        if options.terminate:
            raise RuntimeError("Exiting due to terminate flag being set to true.")
        graph = _entry(options, "gpu_graph_id")
        waits = _entry(options, "disable_synchronize_execution_providers") != "1"
        if self._graphs and graph != NO_GRAPH:
            do = self._captured_graphs.get((threading.get_ident(), graph))
            if do is None:
                self._capture(graph, self._work(binding, options))
                return
            self.replays.append(graph)
        else:
            do = self._work(binding, options if self._eager else onnxruntime.RunOptions())
        self._runtime.compute(self._stream, do)
        if waits or self._eager:
            self._runtime.synchronize_stream(self._stream)

    def _capture(self, graph: str, do: Callable[[], None]) -> None:
        for _ in range(WARM_UP_RUNS):
            self._now(do)
        self._runtime.capture(self._ground.capturing)
        self._captured_graphs[threading.get_ident(), graph] = do
        self.captures.append(graph)
        self._now(do)

    def _now(self, do: Callable[[], Any]) -> Any:
        found: list[Any] = []
        self._runtime.compute(self._stream, lambda: found.append(do()))
        self._runtime.synchronize_stream(self._stream)
        return found[0]

    def _work(self, binding: FakeBinding, options: Any) -> Callable[[], None]:
        """Return the computation from the input addresses to the output addresses that are bound now."""
        inputs, outputs = dict(binding.inputs), dict(binding.outputs)

        def do() -> None:
            real = self._real.io_binding()
            for bind, each in ((real.bind_input, inputs), (real.bind_output, outputs)):
                for name, (kind, device, code, shape, pointer) in each.items():
                    self._check(name, kind, device, pointer)
                    bind(name, "cpu", 0, code, shape, pointer)
            self._real.run_with_iobinding(real, options)

        return do

    def _check(self, name: str, kind: str, device: int, pointer: int) -> None:
        on_device = name not in self._ground.on_host
        if (kind == "cuda") != on_device:
            raise AssertionError(f"'{name}' is bound on {kind}, where ONNX Runtime would copy it once and never again")
        if kind == "cuda" and not self._runtime.memory_at(pointer, 1).device == device == self._device:
            raise AssertionError(f"'{name}' is bound to memory of another device")


def _entry(options: Any, name: str) -> str:
    try:
        return str(options.get_run_config_entry(name))
    except RuntimeError:
        return ""


class _Part:
    def __init__(self, ground: FakeGround, part: Any) -> None:
        nodes = part.get_nodes()
        self._nodes = nodes
        self.ep_name = CPU if nodes[0].op_type in ground.cpu_nodes else CUDA

    def get_nodes(self) -> Any:
        return self._nodes


class _Place:
    def __init__(self, ground: FakeGround, name: str) -> None:
        self.name = "Cpu" if name in ground.on_host else "Cuda"


def fake_cuda_loader(ground: FakeGround | FakeRuntime) -> Loader:
    """Make a Loader for the devices of a fake runtime."""
    stands = FakeGround(ground) if isinstance(ground, FakeRuntime) else ground

    def load(path: Path, device: str, options: Mapping[str, str]) -> Backend:
        number = device_number(device)
        return onnx.load(path, device, options) if number is None else load_on_gpu(path, number, options, stands)

    return load
