"""Hooks in worker processes: they behave as in the server's process, except where stated here."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import penstock.server
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.spec import HookSpec, WorkerSpec
from penstock.server.hooks.generator_call import MAX_AHEAD
from penstock.server.hooks.placement import HookPlacement
from penstock.server.hooks.runner import Hooks
from tests.server.hooks.stage import Act, PuppetEngine, Stage, refusal

pytestmark = pytest.mark.slow

X = {"x": np.array([[1, 2, 3, 4]], np.float32)}
PARAMETERS = {"k": 1.5, "text": "é", "flag": True, "big": 2**60}
METADATA = {"labels": ["a", "b"], "since": dt.date(2026, 11, 22), "at": dt.time(3, 4), "deep": {"n": 1}}
SOURCES = {
    "the newer form": """
        def pre_inference(sample, signature, metadata):
            first = signature[0]
            assert (first.name, list(first.shape)) == ("x", [-1, 4]), first
            return {first.name: sample["x"]}
        def post_inference(prediction, signature, metadata):
            return {"y": prediction[0], "labels": metadata["labels"], "since": metadata["since"], "at": metadata["at"]}
    """,
    "the older form": """
        def pre_inference(sample, metadata): return sample["x"]
        def post_inference(prediction, metadata): return {metadata[0].name: prediction[0] * 2}
    """,
    "parameters, with something left for the other hook": """
        class Left:
            value = 7
        def pre_inference(sample, signature, metadata, parameters):
            parameters["left"] = Left()
            return sample["x"]
        def post_inference(prediction, signature, metadata, parameters):
            got = {key: value for key, value in parameters.items() if key != "left"}
            return {"y": prediction[0], "left": parameters["left"].value, "got": str(sorted(got.items()))}
    """,
    "globals": """
        current = None
        def pre_inference(sample, metadata):
            global current
            current = sample
            return sample["x"]
        def post_inference(prediction, metadata): return {"y": prediction[0], "rows": len(current["x"])}
    """,
    "async": """
        import asyncio
        tasks = []
        async def left_behind():
            await asyncio.sleep(0)
            return 5
        async def pre_inference(sample, metadata):
            tasks.append(asyncio.create_task(left_behind()))
            await asyncio.sleep(0)
            return sample["x"]
        async def post_inference(prediction, metadata): return {"y": prediction[0], "task": await tasks.pop()}
    """,
    "an argument that is written to": """
        def pre_inference(sample, metadata):
            x = sample["x"] if isinstance(sample["x"], list) else sample["x"].copy()
            x[0] = [9, 9, 9, 9]
            return x
        def post_inference(prediction, metadata):
            y = prediction[0].copy()
            y += 1
            return [y]
    """,
    "a sample that lacks something": "def pre_inference(sample, metadata): return sample['gone']",
    "a shape that does not fit": "def pre_inference(sample, metadata): return [1, 2, 3]",
    "a refusal of its own": """
        from penstock.backends.errors import Code, InferError
        def pre_inference(sample, metadata): raise InferError(Code.OVERLOADED, "not now", 5)
    """,
    "sys.exit before": "import sys\ndef pre_inference(sample, metadata): sys.exit('no')",
    "sys.exit after": "import sys\nasync def post_inference(prediction, metadata): sys.exit(3)",
    "what it answers cannot be told": "def post_inference(prediction, metadata): return object()",
    "it fails after": "def post_inference(prediction, metadata): return prediction[7]",
    "it says nothing": "def post_inference(prediction, metadata): return None",
    "no numbers": "def post_inference(prediction, metadata): return {'y': float('nan'), 'z': [float('inf')]}",
    "text": "def post_inference(prediction, metadata): return 'naïve'",
}


async def outcome_of(hooks: Hooks, sample: Any, call: str) -> Any:
    """Give what a client would receive: an answer or an error."""
    try:
        answer = await getattr(hooks, call)(sample, "id-1", parameters=PARAMETERS)
    except InferError as error:
        return error.code, error.message, error.retry_after_ns
    if isinstance(answer, bytes):
        return answer
    return {name: (array.dtype.str, array.shape, str(array.tolist())) for name, array in answer.items()}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_answers_and_errors_from_a_worker_equal_those_in_process(act: Act, source: str) -> None:
    async def scene(stage: Stage) -> None:
        here = await stage.load(source, workers=0, metadata=METADATA)
        there = await stage.load(source, workers=1, metadata=METADATA)

        for call, sample in (("predict", {"x": [[1, 2, 3, 4]], "none": None}), ("infer", X), ("predict", {})):
            assert await outcome_of(there, sample, call) == await outcome_of(here, sample, call)
        assert (there.has_pre, there.has_post, there.yields) == (here.has_pre, here.has_post, here.yields)

    act(scene)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_hook_can_return_its_signature_as_the_answer(act: Act, tmp_path: Path, workers: int) -> None:
    source = """
        def pre_inference(sample, signature, metadata, parameters):
            parameters["signature"] = signature
            return sample
        def post_inference(prediction, signature, metadata, parameters): return parameters["signature"]
    """
    file = tmp_path / "signed.py"
    file.write_text(textwrap.dedent(source))
    node = SimpleNamespace(name="x", type="tensor(float)", shape=["N", 4])  # as little JSON as onnxruntime's own

    async def scene(stage: Stage) -> None:
        hooks = await stage.load_spec(HookSpec(file, workers=workers), node_inputs=[node])

        assert await hooks.predict([1] * 4) == b'[{"name":"x","type":"tensor(float)","shape":["N",4]}]'

    act(scene)


SIGNATURES: dict[str, tuple[Signature, Callable[[list[Any]], list[Any]], dict[str, Any]]] = {
    "text": (
        Signature((TensorSpec("t", "BYTES", (-1, 1)),), (TensorSpec("u", "BYTES", (-1, 1)),), batched=True),
        lambda inputs: [np.array([["é".encode()], [b"\xff"]], object)],
        {"t": np.array([[b"one"], [b"\x00two"]], object)},
    ),
    "maps": (
        Signature(
            (TensorSpec("t", "FP32", (-1, 1)),),
            (TensorSpec("label", "INT64", (-1,)), TensorSpec("p", "seq(map(int64,tensor(float)))", ())),
        ),
        lambda inputs: [np.array([3]), [{0: 0.5, 1: float("nan")}]],
        {"t": np.array([[1]], np.float32)},
    ),
    "bfloat16": (
        Signature((TensorSpec("t", "BF16", (-1, 2)),), (TensorSpec("u", "BF16", (-1, 2)),), batched=True),
        list,
        {"t": np.array([[0x3F80, 0x4000]], np.uint16)},
    ),
    "float16, bool and a scalar": (
        Signature(
            (TensorSpec("t", "FP16", (-1, 2)), TensorSpec("b", "BOOL", (-1,), optional=True)),
            (TensorSpec("u", "FP16", (-1, 2)), TensorSpec("v", "INT8", ())),
        ),
        lambda inputs: [inputs[0], np.array(3, np.int8)],
        {"t": np.array([[1, 2]], np.float16)},
    ),
}


@pytest.mark.parametrize("kind", SIGNATURES)
def test_tensors_of_every_kind_reach_a_worker_as_they_do_in_process(act: Act, kind: str) -> None:
    signature, function, sample = SIGNATURES[kind]
    source = """
        def pre_inference(sample, metadata):
            return {name: array for name, array in sample.items() if (repr(array), array.dtype)}
        def post_inference(prediction, metadata):
            return repr([each.tolist() if hasattr(each, "tolist") else each for each in prediction])
    """

    async def scene(stage: Stage) -> None:
        arrays: list[Any] = []

        def run(inputs: list[Any]) -> list[Any]:
            arrays.append([None if each is None else (each.dtype, each.tolist()) for each in inputs])
            return function(inputs)

        engine = PuppetEngine(run, at_once=True)
        here = await stage.load(source, engine, signature, workers=0)
        there = await stage.load(source, engine, signature, workers=1)

        assert await there.predict(dict(sample)) == await here.predict(dict(sample))
        assert await outcome_of(there, sample, "infer") == await outcome_of(here, sample, "infer")
        assert arrays[0] == arrays[1] == arrays[2] == arrays[3]

    act(scene)


class TestArrays:
    def test_large_arrays_are_writable_in_hooks_and_returned_complete(self, act: Act) -> None:
        source = """
            def pre_inference(sample, metadata):
                sample["x"][0, 0] = 7
                return sample
            def post_inference(prediction, metadata):
                prediction[0][0, 1] = 8
                return prediction
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source, workers=1)
            body = np.ones((37_500, 4), np.float32)
            body.flags.writeable = False
            answer = (await hooks.infer({"x": body}))["y"]

            assert answer.shape == body.shape
            assert answer[0].tolist() == [7, 8, 1, 1]
            assert answer[1:].min() == answer[1:].max() == 1
            assert body[0, 0] == 1

        act(scene)


class TestWorkerAssignment:
    WHO = "import os\n{}def post_inference(prediction, metadata): return [os.getpid()]"

    def test_each_of_the_configured_workers_runs_calls(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(
                self.WHO.format("import time\n").replace("return", "time.sleep(0.02); return"), workers=3
            )
            pids = {json.loads(each)[0] for each in await asyncio.gather(*(hooks.predict([0] * 4) for _ in range(24)))}

            assert pids == set(worker_pids(hooks))
            assert len(pids) == 3
            assert os.getpid() not in pids

        act(scene)

    def test_a_worker_whose_globals_are_written_handles_one_request_at_a_time(self, act: Act) -> None:
        source = """
            import os
            current = None
            def pre_inference(sample, metadata):
                global current
                current = sample
                return [sample] * 4
            def post_inference(prediction, metadata): return [current, os.getpid()]
        """

        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(source, engine, workers=2)
            calls = [asyncio.ensure_future(hooks.predict(number)) for number in range(6)]
            for _ in range(3):
                await engine.gather(2)
                assert engine.waiting == 2
                engine.run()
            answers = [json.loads(each) for each in await asyncio.gather(*calls)]

            assert [number for number, _ in answers] == list(range(6))
            assert len({pid for _, pid in answers}) == 2

        act(scene)

    def test_objects_left_in_parameters_are_freed_when_a_request_is_cancelled_between_hooks(self, act: Act) -> None:
        source = """
            import gc
            class Left: pass
            def pre_inference(sample, signature, metadata, parameters):
                parameters["left"] = Left()
                return [1] * 4
            def post_inference(prediction, signature, metadata, parameters):
                gc.collect()
                return [sum(isinstance(each, Left) for each in gc.get_objects())]
        """

        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(source, engine, workers=1)
            cancelled = [asyncio.ensure_future(hooks.predict(0)) for _ in range(3)]
            await engine.gather(3)
            for each in cancelled:
                each.cancel()
            await asyncio.wait(cancelled)
            engine.run()
            call = asyncio.ensure_future(hooks.predict(0))
            await engine.gather(1)
            engine.run()

            assert json.loads(await call) == [1]

        act(scene)


class TestReporting:
    @pytest.mark.parametrize(("workers", "words"), [(1, "in 1 worker process,"), (2, "in 2 worker processes,")])
    def test_the_number_of_workers_is_logged(
        self, act: Act, caplog: pytest.LogCaptureFixture, workers: int, words: str
    ) -> None:
        caplog.set_level(logging.INFO, "penstock.hooks")

        async def scene(stage: Stage) -> None:
            await stage.load("def post_inference(prediction, metadata): return 1", workers=workers)
            assert any(words in each.getMessage() for each in caplog.records)

        act(scene)

    def test_a_traceback_from_a_worker_is_logged_with_the_request_id(
        self, act: Act, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load("def post_inference(prediction, metadata): return 1 / 0", workers=1)
            code, text = await refusal(hooks.predict([0] * 4))
            (record,) = [
                each for each in caplog.records if each.name == "penstock.hooks" and each.levelno > logging.INFO
            ]

            assert code is Code.INTERNAL
            assert text == f"post_inference failed; see the server log, request id {record.request_id}"  # type: ignore[attr-defined]
            assert record.getMessage() == "post_inference raised ZeroDivisionError: division by zero"
            assert "hooks.py" in (record.exc_text or "")

        act(scene)

    def test_the_statistics_count_hook_times_measured_in_the_worker(self, act: Act) -> None:
        source = """
            import time
            def pre_inference(sample, metadata):
                time.sleep(0.05)
                return [1] * 4
            def post_inference(prediction, metadata): return 1
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source, workers=1)
            await hooks.predict(0)
            counted = stage.model.statistics._hook_ns

            assert 50_000_000 <= counted["pre"][0] < 1_000_000_000
            assert [len(each) for each in counted.values()] == [1, 1]

        act(scene)

    def test_a_faulty_file_fails_the_load_in_a_worker_as_in_process(self, act: Act, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            for source in ("x = 1", "def pre_inference(sample): return 1", "import nothing_of_that_name"):
                here = await refusal(stage.load(source, workers=0))
                there = await refusal(stage.load(source, workers=2))
                assert here == there
            code, text = await refusal(stage.load("import os\nos._exit(3)", workers=1))
            assert (code, "exit status 3" in text) == (Code.NOT_READY, True)
            placement = WorkerSpec(interpreter=str(tmp_path / "none"))
            code, text = await refusal(
                stage.load("def pre_inference(sample, metadata): 1", workers=1, worker=placement)
            )
            assert "hooks of model 'm'" in text

        act(scene)


COUNTS = """
    def post_inference(prediction, signature, metadata, parameters):
        log = open(parameters["log"], "a", buffering=1)
        try:
            for number in range(parameters["n"]):
                print(number, file=log)
                if number == parameters.get("fails"):
                    raise KeyError("half-way")
                yield {"number": [number], "same": prediction[0]}
        finally:
            print("closed", file=log)
"""


class TestGenerators:
    @pytest.mark.parametrize("kind", ["", "async "])
    def test_a_generator_delivers_every_answer_and_is_closed(self, act: Act, tmp_path: Path, kind: str) -> None:
        source = COUNTS + f"    {kind}def pre_inference(sample, metadata): return sample"

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source, workers=2, decoupled=True)
            for count in (0, 1, 30):
                parameters = {"n": count, "log": str(tmp_path / str(count))}
                answers = [each async for each in hooks.stream(X, parameters=parameters)]
                assert [int(each.outputs["number"][0]) for each in answers] == list(range(count))
                assert all((each.outputs["same"] == X["x"]).all() and each.infer_ns for each in answers)
                assert (tmp_path / str(count)).read_text().split()[-1] == "closed"

        act(scene)

    def test_an_abandoned_generator_runs_at_most_max_ahead_answers_and_is_closed(
        self, act: Act, tmp_path: Path
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(COUNTS, workers=1, decoupled=True)
            log = tmp_path / "log"
            async with aclosing(hooks.stream(X, parameters={"n": 100, "log": str(log)})) as answers:
                await anext(answers)
            other = [each async for each in hooks.stream(X, parameters={"n": 1, "log": str(tmp_path / "other")})]
            steps = log.read_text().split()

            assert len(other) == 1
            assert steps[-1] == "closed"
            assert 1 <= len(steps) - 1 <= MAX_AHEAD + 1

        act(scene)

    def test_parallel_generators_in_one_worker_all_complete(self, act: Act, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(COUNTS, workers=1, decoupled=True)
            parameters = [{"n": 20, "log": str(tmp_path / f"log{at}")} for at in range(3)]
            answers = await asyncio.gather(*(collect([], hooks, "", each) for each in parameters))

            assert [len(each) for each in answers] == [20, 20, 20]

        act(scene)

    def test_an_exception_of_a_generator_is_reported_after_the_answers_before_it(
        self, act: Act, tmp_path: Path
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(COUNTS, workers=1, decoupled=True)
            parameters = {"n": 5, "fails": 3, "log": str(tmp_path / "log")}
            answers: list[Any] = []
            code, text = await refusal(collect(answers, hooks, "r", parameters))

            assert [int(each.outputs["number"][0]) for each in answers] == [0, 1, 2]
            assert (code, text.endswith("see the server log, request id r")) == (Code.INTERNAL, True)
            assert (tmp_path / "log").read_text().split()[-1] == "closed"

        act(scene)

    def test_a_generator_continues_after_it_yields_an_error(self, act: Act) -> None:
        source = """
            from penstock.backends.errors import Code, InferError
            def post_inference(prediction, metadata):
                yield InferError(Code.UNSUPPORTED, "not this one")
                yield "text"
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source, workers=1, decoupled=True)
            first, second = [each async for each in hooks.stream(X)]

            assert first.error is not None
            assert (first.error.code, first.error.message) == (Code.UNSUPPORTED, "not this one")
            assert second.outputs["y"].tolist() == [b"text"]
            assert await refusal(hooks.predict([0] * 4)) == (Code.UNSUPPORTED, "not this one")

        act(scene)

    def test_a_hook_that_was_suspended_with_the_server_is_not_timed_out(self, act: Act) -> None:
        source = """
            import time
            def post_inference(prediction, metadata):
                time.sleep(0.3)
                return 7
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source, workers=1)
            running = asyncio.create_task(hooks.predict([0] * 4))
            assert hooks._placement is not None
            (replica,) = hooks._placement.replicas._live
            while not replica._sent:  # noqa: ASYNC110 - sending sets no event
                await asyncio.sleep(0)
            replica._sent[0].limit_start_ns -= 60_000_000_000
            replica._check_due_ns -= 60_000_000_000
            replica._check()

            assert await running == b"7"

        act(scene)

    def test_the_time_limit_applies_to_each_step_of_a_generator(self, act: Act) -> None:
        source = """
            import time
            def post_inference(prediction, metadata):
                for each in range(4):
                    time.sleep(0.2)
                    yield each
                time.sleep(60)
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source, workers=1, decoupled=True, timeout_s=0.6)
            answers: list[Any] = []
            error = await refusal(collect(answers, hooks, "", {}))

            assert error == (Code.EXPIRED, "post_inference of model 'm' took longer than its limit of 0.6 s")
            assert len(answers) == 4

        act(scene)


async def collect(answers: list[Any], hooks: Hooks, request_id: str, parameters: dict[str, Any]) -> list[Any]:
    async for each in hooks.stream(X, request_id, parameters=parameters):
        answers.append(each)  # noqa: PERF401 - the answers before an exception are checked
    return answers


def worker_pids(hooks: Hooks) -> list[int]:
    placement = hooks._placement
    assert isinstance(placement, HookPlacement)
    return [replica.pid for replica in placement.replicas._live]


FORBIDS = """
    import sys
    class Only:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {forbidden}:
                raise ImportError(name + " is not to be imported")
    sys.meta_path.insert(0, Only())
    sys.path.insert(0, {folder!r})
    from child import make_importable
    make_importable({packages})
    import penstock.server.hooks.worker_service
    import penstock.server.python_models.inside.service
    import penstock.server.workers.service
    print(*sorted({{name.partition(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names)))
"""


def test_a_worker_imports_no_packages_but_numpy_and_orjson() -> None:
    server = Path(penstock.server.__file__ or "").parent
    packages = [f"{name}={folder}" for name, folder in _packages()]
    forbidden = {
        "onnxruntime",
        "uvloop",
        "fastapi",
        "uvicorn",
        "tritonclient",
        "google",
        "httptools",
        "pydantic",
        "simdjson",
        "asyncio",  # a sixth of a worker's start time, spared when no hook is a coroutine
    }
    source = FORBIDS.format(forbidden=forbidden, folder=str(server / "workers"), packages=packages)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=False, timeout=30
    )

    assert done.returncode == 0, done.stderr
    # sitecustomize is the system's, if it has one
    found = set(done.stdout.split()) - {"__main__", "child", "sitecustomize"}
    assert {name for name in found if not name.startswith("_")} == {"numpy", "orjson", "penstock"}


def _packages() -> list[tuple[str, str]]:
    root = Path(penstock.server.__file__ or "").parents[1]
    return [(name, str(root / name)) for name in ("backends", "batching", "server")]
