from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.backend import needs_thread
from penstock.backends.errors import Code, InferError
from penstock.backends.loading import LOADERS
from penstock.backends.node import Node
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.spec import WorkerSpec
from penstock.server.isolated.loader import IsolatedLoader, label_of, read_worker_spec, with_isolated
from penstock.server.isolated.messages import read_signature, write_binding
from tests.fakes import FakeBackend, fake_loader
from tests.processes import lives
from tests.server.isolated.faulty_backend import Fault
from tests.server.isolated.stage import HERE, faulty, faulty_loader, nothing_left, own_python

PATH = Path("/models/faulty/1/model")


def refusal(loader: IsolatedLoader, **options: Any) -> InferError:
    with nothing_left(), pytest.raises(InferError) as caught:
        loader(PATH, "cpu", {key.replace("worker_", "worker."): str(value) for key, value in options.items()})
    return caught.value


@pytest.mark.slow
class TestLoading:
    def test_an_isolated_backend_has_the_metadata_of_its_model(self) -> None:
        with nothing_left(), faulty(width=4) as backend:
            assert backend.graph.inputs == (TensorSpec("x", "FP32", (-1, 4)),)
            assert backend.node_inputs == [Node("x", "float", [None, "width"])]
            assert backend.node_outputs == [Node("y", "float", [None, 4])]
            assert backend.platform == "faulty"
            assert backend.compiles_each_size
            assert backend.runtime_metadata == {"said": {"of": "it", "deep": [1, None]}}
            assert backend.pid != os.getpid()

    def test_an_error_of_the_loader_is_raised_unchanged(self) -> None:
        error = refusal(faulty_loader(), load=int(Fault.REFUSE))

        assert (error.code, error.message) == (Code.INVALID, "not this one")

    def test_a_process_that_ends_during_the_load_is_reported_with_its_last_output(self) -> None:
        error = refusal(faulty_loader(), load=int(Fault.DIE))

        assert error.message == "model 'faulty' ended while it was starting: exit status 7: this is the end"

    def test_a_process_that_crashes_during_the_load_is_reported_with_its_signal(self) -> None:
        error = refusal(faulty_loader(), load=int(Fault.CRASH))

        assert error.message.startswith("model 'faulty' ended while it was starting: signal 11 (SIGSEGV)")

    def test_a_process_above_its_memory_limit_during_the_load_is_killed(self) -> None:
        error = refusal(faulty_loader(), load=int(Fault.GROW), worker_memory_mb=200)

        assert "MiB of memory, more than its limit of 200 MiB" in error.message

    def test_an_unexpected_exception_of_the_loader_is_an_internal_error(self) -> None:
        assert refusal(faulty_loader(), load=int(Fault.RAISE)).code is Code.INTERNAL

    def test_a_loader_module_that_does_not_exist_is_an_error(self) -> None:
        error = refusal(IsolatedLoader("no_such_module:load", own_python))

        assert "no_such_module" in error.message

    def test_an_interpreter_that_does_not_exist_is_an_error(self) -> None:
        error = refusal(faulty_loader(), worker_interpreter="/no/such/python")

        assert error.code is Code.INVALID
        assert "/no/such/python" in error.message

    def test_the_interpreter_is_requested_with_the_worker_options(self, tmp_path: Path) -> None:
        calls: list[tuple[WorkerSpec, str]] = []

        def interpreters(spec: WorkerSpec, label: str) -> str:
            calls.append((spec, label))
            return sys.executable

        options = {
            "worker.requirements": "/a/requirements.txt",
            "worker.interpreter": "python3",
            "worker.timeout_s": "2",
        }
        backend = IsolatedLoader("faulty_backend:load", interpreters, (HERE,))(PATH, "cpu", options)
        limit_s = backend.limit_s
        backend.close()

        assert calls == [(WorkerSpec("python3", Path("/a/requirements.txt"), timeout_s=2.0), "model 'faulty'")]
        assert limit_s == 2.0

    def test_the_output_of_the_runtime_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "penstock.workers")
        with faulty(load=int(Fault.PRINT)):
            pass

        assert "model 'faulty': a line of the runtime" in caplog.messages
        assert "model 'faulty': the model is closed" in caplog.messages

    def test_closing_a_model_twice_leaves_nothing(self) -> None:
        with nothing_left(), faulty() as backend:
            pid = backend.pid
            backend.close()
            assert not lives(pid)

    def test_the_loop_thread_runs_only_while_there_are_workers(self) -> None:
        loader = faulty_loader()

        def watched() -> bool:
            return any(thread.name == "isolated" for thread in threading.enumerate())

        running = [watched()]
        backends = [loader(PATH, "cpu", {}) for _ in range(2)]
        for backend in backends:
            running.append(watched())
            backend.close()
        running.append(watched())
        loader(PATH, "cpu", {}).close()

        assert running == [False, True, True, False]

    def test_models_can_be_loaded_on_several_threads_in_parallel(self) -> None:
        loader = faulty_loader()

        def load() -> None:
            loader(PATH, "cpu", {}).close()

        with nothing_left():
            threads = [threading.Thread(target=load) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def test_a_worker_inherits_the_cpu_affinity_of_the_loading_thread(self) -> None:
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(allowed)})
        try:
            with faulty() as backend:
                affinity = os.sched_getaffinity(backend.pid)
        finally:
            os.sched_setaffinity(0, allowed)
        with faulty() as backend:
            free = os.sched_getaffinity(backend.pid)

        assert (affinity, free) == ({min(allowed)}, allowed)


class TestLoaders:
    def test_tensorflow_is_isolated_unless_the_caller_passes_a_loader(self) -> None:
        brought = fake_loader(FakeBackend(Signature((), ()), list))
        table = with_isolated(LOADERS, own_python)

        assert isinstance(table["tensorflow"], IsolatedLoader)
        assert with_isolated({"onnxruntime": brought}, own_python)["onnxruntime"] is brought
        assert with_isolated({"tensorflow": brought}, own_python)["tensorflow"] is brought

    def test_only_a_backend_with_threads_only_needs_a_thread(self) -> None:
        class Other:
            threads_only = True

        assert needs_thread(Other())  # type: ignore[arg-type]
        assert not needs_thread(object())  # type: ignore[arg-type]


class TestOptions:
    @pytest.mark.parametrize(
        ("path", "label"),
        [
            ("/r/iris/3/model.savedmodel", "model 'iris'"),
            ("/r/iris/3", "model 'iris'"),
            ("iris/3", "model 'iris'"),
            ("/r/iris", "model 'iris'"),
            ("3", "model '3'"),
        ],
    )
    def test_a_model_is_named_by_its_path(self, path: str, label: str) -> None:
        assert label_of(Path(path)) == label

    def test_a_configured_name_is_the_label(self) -> None:
        assert label_of(Path("/models/tensorflow/1"), "classifier") == "model 'classifier'"

    @pytest.mark.parametrize("text", ["x", "-1", "nan", "inf"])
    @pytest.mark.parametrize("name", ["worker.memory_mb", "worker.timeout_s"])
    def test_a_worker_limit_that_is_not_a_number_is_rejected(self, name: str, text: str) -> None:
        with pytest.raises(
            InferError, match=f"model 'm': option '{name}' must be a number of at least 0, not '{text}'"
        ):
            read_worker_spec({name: text}, "model 'm'")

    def test_an_unknown_worker_option_is_rejected(self) -> None:
        with pytest.raises(InferError, match=r"unknown option 'worker\.memory'"):
            read_worker_spec({"worker.memory": "1"}, "model 'm'")

    def test_limits_are_read_in_the_units_of_their_names(self) -> None:
        assert read_worker_spec({"worker.memory_mb": "1.5", "worker.timeout_s": "0.5"}, "m") == WorkerSpec(
            timeout_s=0.5, memory_bytes=3 << 19
        )

    def test_a_signature_is_serialized_completely(self) -> None:
        import json

        signature = Signature(
            (TensorSpec("a", "FP32", (-1, 2), True, ("n", ""), (2, 1), ragged=True, is_shape=True),),
            (TensorSpec("b", "BYTES", ()),),
            batched=True,
        )
        written, capacity_rows = json.loads(write_binding(signature, 7))

        assert (read_signature(written), capacity_rows) == (signature, 7)
        assert read_signature(written).inputs[0].axes == ("n", "")
