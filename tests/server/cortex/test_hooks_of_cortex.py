"""Request handlers of Cortex run as hooks: in the server's process and in workers."""

from __future__ import annotations

import asyncio
import itertools
import json
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.loading import LOADERS
from penstock.backends.node import Node
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.spec import HookSpec, ModelSpec
from penstock.perf import models
from penstock.server.fronts.model_table import read_model, write_model
from penstock.server.hooks import replicas
from penstock.server.hooks.engine import HookedEngine
from penstock.server.hooks.plan import DEFAULT_REPLICAS, LIGHT_REPLICAS
from penstock.server.hooks.replica import Replica
from penstock.server.hooks.runner import Hooks
from tests.server.cortex.values import settings
from tests.server.hooks.stage import Act, PuppetEngine, Stage, acted, refusal

M = Signature((TensorSpec("input", "FP32", (-1, 4)),), (TensorSpec("label", "INT64", (-1,)),), batched=True)
NODE = Node("input", "tensor(float)", ["N", 4])
IN_SERVER, IN_WORKERS = 0, 1
PLACES = [pytest.param(IN_SERVER, id="server"), pytest.param(IN_WORKERS, id="worker", marks=pytest.mark.slow)]
FLOWER = {"sepal_length": 5.2, "sepal_width": 3.6, "petal_length": 1.4, "petal_width": 0.3}
IRIS = """
    labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]

    def pre_inference(sample, signature, metadata):
        return {
            signature[0].name: [
                sample["sepal_length"], sample["sepal_width"], sample["petal_length"], sample["petal_width"],
            ]
        }

    def post_inference(prediction, signature, metadata):
        return labels[prediction[0][0]]
"""
RAISING = """
    import sys
    from penstock.backends.errors import Code, InferError

    def fail(how):
        if how == "exit":
            sys.exit("leaving")
        if how == "refuse":
            raise InferError(Code.OVERLOADED, "busy")
        raise KeyError(how)

    def pre_inference(sample, metadata):
        if sample["in"] == "pre":
            fail(sample["how"])
        return [1, 2, 3, 4]

    def post_inference(prediction, metadata):
        fail("post" if prediction[0][0] else "")
"""


@pytest.fixture
def act(tmp_path: Path) -> Iterator[Act]:
    yield from acted(tmp_path)


def spec(folder: Path, source: str | None, **options: Any) -> HookSpec:
    path = Path()
    if source is not None:
        path = folder / "hooks.py"
        path.write_text(textwrap.dedent(source))
    return HookSpec(path, dialect="cortex", dialect_settings=settings("onnx"), **options)


def label(of: int) -> PuppetEngine:
    return PuppetEngine(lambda _: [np.array([of])], at_once=True)


async def served(stage: Stage, hooks: HookSpec, engine: PuppetEngine | None = None) -> Any:
    return await stage.load_spec(hooks, M, engine or label(0), node_inputs=[NODE])


@pytest.mark.parametrize("workers", PLACES)
class TestAnswers:
    def test_the_answer_equals_the_bytes_that_cortex_sent(self, act: Act, tmp_path: Path, workers: int) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await served(stage, spec(tmp_path, IRIS, workers=workers))
            assert await hooks.predict(FLOWER) == b'"iris-setosa"\n'

        act(scene)

    def test_the_answer_is_the_prediction_without_hooks(self, act: Act, tmp_path: Path, workers: int) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await served(stage, spec(tmp_path, "labels = []", workers=workers))
            assert await hooks.predict({"input": [5.2, 3.6, 1.4, 0.3]}) == b"[[0]]\n"

        act(scene)

    def test_a_tracker_line_precedes_the_answer(self, act: Act, tmp_path: Path, workers: int) -> None:
        async def scene(stage: Stage) -> None:
            hooks = spec(tmp_path, IRIS, workers=workers)
            tracker = {"tracker": {"model_type": "classification", "key": ""}}
            stated = HookSpec(
                hooks.path, workers=workers, dialect="cortex", dialect_settings=settings("onnx", **tracker)
            )
            loaded = await served(stage, stated)
            body = await loaded.predict(FLOWER, parameters={"tracked": True})
            assert body == b'{"class":"iris-setosa"}\n"iris-setosa"\n'

        act(scene)


@pytest.mark.parametrize("workers", PLACES)
class TestFailures:
    TEXT = "error: handler.py: {} request handler: {}: runtime exception"

    def test_an_exception_of_a_hook_is_reported_with_the_message_of_cortex(
        self, act: Act, tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await served(stage, spec(tmp_path, RAISING, workers=workers), label(1))
            for how, text in (("x", "'x'"), ("exit", "leaving"), ("refuse", "busy")):
                message = self.TEXT.format("pre_inference", text)
                assert await refusal(hooks.predict({"in": "pre", "how": how})) == (Code.INVALID, message), how
            message = self.TEXT.format("post_inference", "'post'")
            assert await refusal(hooks.predict({"in": "post"})) == (Code.INVALID, message)
            (logged,) = [each for each in caplog.records if "post_inference raised" in each.getMessage()]
            assert "KeyError: 'post'" in caplog.text
            assert logged.exc_info or logged.exc_text

        act(scene)

    def test_a_value_that_does_not_fit_the_model_is_not_reported_as_a_hook_exception(
        self, act: Act, tmp_path: Path, workers: int
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await served(stage, spec(tmp_path, "def pre_inference(sample, metadata): return sample",
                                             workers=workers))  # fmt: skip
            text = (
                'error: key "input": failed to convert to numpy array: cannot reshape array of size 2 into shape (1,4)'
            )
            assert await refusal(hooks.predict([1, 2])) == (Code.INVALID, text)

        act(scene)

    def test_an_answer_that_cannot_be_encoded_fails_with_code_unknown(
        self, act: Act, tmp_path: Path, workers: int
    ) -> None:
        async def scene(stage: Stage) -> None:
            source = "def post_inference(prediction, metadata): return object()"
            hooks = await served(stage, spec(tmp_path, source, workers=workers))
            code, _ = await refusal(hooks.predict([1, 2, 3, 4]))
            assert code is Code.UNKNOWN

        act(scene)


class TestDebug:
    def test_debug_values_are_logged_by_the_server(
        self, act: Act, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await served(stage, spec(tmp_path, IRIS))
            with caplog.at_level("INFO", "penstock.hooks"):
                assert await hooks.predict(FLOWER, parameters={"debug": True}) == b'"iris-setosa"\n'
            for name in ("pre_inference", "inference", "post_inference"):
                assert any(each.getMessage().startswith(f"{name}: ") for each in caplog.records), name

        act(scene)

    @pytest.mark.slow
    def test_debug_values_are_logged_by_a_worker(
        self, act: Act, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await served(stage, spec(tmp_path, IRIS, workers=1))
            with caplog.at_level("INFO", "penstock"):
                assert await hooks.predict(FLOWER, parameters={"debug": True}) == b'"iris-setosa"\n'
                await stage.close()
            for name in ("pre_inference", "inference", "post_inference"):
                assert f"{name}: " in caplog.text, name

        act(scene)


def test_samples_are_converted_without_a_handler_file(act: Act, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await served(stage, spec(tmp_path, None))
        for sample in ({"input": [5.2, 3.6, 1.4, 0.3]}, [5.2, 3.6, 1.4, 0.3]):
            assert await hooks.predict(sample) == b"[[0]]\n"
        assert await refusal(hooks.predict({"inputs": []})) == (Code.INVALID, 'error: missing key "input"')

    act(scene)


def test_tensorflow_handlers_get_the_whole_signature_map(act: Act, tmp_path: Path) -> None:
    signature_def = {
        "inputs": {"x": {"name": "x:0", "dtype": "DT_DOUBLE", "tensorShape": {"dim": [{"size": "-1"}]}}},
        "outputs": {"y": {"name": "y:0", "dtype": "DT_INT64", "tensorShape": {"dim": [{"size": "-1"}]}}},
        "methodName": "tensorflow/serving/predict",
    }
    described = {
        "signature_def": {"predict": signature_def, "other": signature_def},
        "signature_key": "predict",
    }
    signature = Signature((TensorSpec("x", "FP64", (-1,)),), (TensorSpec("y", "INT64", (-1,)),), batched=True)
    source = """
        def pre_inference(sample, signature, metadata):
            assert type(signature) is dict and sorted(signature) == ["other", "predict"], signature
            return {name: sample[name] for name in signature["predict"]["inputs"]}

        def post_inference(prediction, signature, metadata):
            return {"label": int(prediction["y"][0]), "dims": signature["other"]["outputs"]["y"]["tensorShape"]["dim"]}
    """

    async def scene(stage: Stage) -> None:
        path = tmp_path / "hooks.py"
        path.write_text(textwrap.dedent(source))
        hooks = HookSpec(path, dialect="cortex", dialect_settings=settings("tensorflow"))
        loaded = await stage.load_spec(hooks, signature, label(7), described=described)
        assert await loaded.predict({"x": 1.5}) == b'{"dims":[{"size":"-1"}],"label":7}\n'

    act(scene)


class TestReplicas:
    """A replica handles one request at a time: post_inference finds the globals that pre_inference set."""

    SOURCE = """
        current = None

        def pre_inference(sample, signature, metadata):
            global current
            current = sample["n"]
            metadata["calls"] = metadata.get("calls", 0) + 1
            return [current, 0, 0, 0]

        def post_inference(prediction, signature, metadata):
            return [current, int(prediction[0].argmax()), metadata["calls"]]
    """

    def test_as_many_requests_as_replicas_share_a_batch(self, act: Act, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            puppet = PuppetEngine(lambda inputs: [inputs[0][:, 0].astype(np.int64)])
            source = self.SOURCE.replace("prediction[0].argmax()", "prediction[0][0]")
            hooks = await served(stage, spec(tmp_path, source, replicas=8), puppet)
            calls = [asyncio.ensure_future(hooks.predict({"n": n})) for n in range(24)]
            for _ in range(3):
                await puppet.gather(8)
                assert puppet.waiting == 8
                puppet.run()
            answers = [json.loads(await each) for each in calls]
            assert [each[:2] for each in answers] == [[n, n] for n in range(24)]
            # each replica gets the same dict in every call
            assert sum(each[2] == 1 for each in answers) == 8

        act(scene)

    async def run_as_many_as_light_replicas(self, folder: Path, stage: Stage) -> None:
        puppet = PuppetEngine(lambda _: [np.array([0])])
        hooks = await served(stage, spec(folder, self.SOURCE), puppet)
        calls = [asyncio.ensure_future(hooks.predict({"n": n})) for n in range(LIGHT_REPLICAS)]
        await puppet.gather(LIGHT_REPLICAS)
        puppet.run()
        await asyncio.gather(*calls)

    def test_a_light_handler_has_more_replicas(self, act: Act, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replicas, "MAX_LIGHT_LOAD_NS", 1 << 62)
        monkeypatch.setattr(replicas, "MAX_LIGHT_BYTES", 1 << 62)

        act(partial(self.run_as_many_as_light_replicas, tmp_path))

    def test_a_handler_is_light_even_if_one_of_its_replicas_was_slow_to_load(
        self, act: Act, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replicas, "MAX_LIGHT_BYTES", 1 << 62)
        loads = itertools.count()
        slow = property(lambda _: replicas.MAX_LIGHT_LOAD_NS + (next(loads) % 2))
        monkeypatch.setattr(Replica, "load_ns", slow)

        act(partial(self.run_as_many_as_light_replicas, tmp_path))

    @pytest.mark.parametrize("heavy", ["MAX_LIGHT_LOAD_NS", "MAX_LIGHT_BYTES"])
    def test_a_heavy_handler_has_the_default_number_of_replicas(
        self, act: Act, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heavy: str
    ) -> None:
        monkeypatch.setattr(replicas, heavy, -(1 << 62))

        async def scene(stage: Stage) -> None:
            puppet = PuppetEngine(lambda _: [np.array([0])])
            hooks = await served(stage, spec(tmp_path, self.SOURCE), puppet)
            calls = [asyncio.ensure_future(hooks.predict({"n": n})) for n in range(16)]
            for _ in range(2):
                await puppet.gather(DEFAULT_REPLICAS)
                assert puppet.waiting == DEFAULT_REPLICAS
                puppet.run()
            await asyncio.gather(*calls)

        act(scene)

    @pytest.mark.slow
    @pytest.mark.parametrize("workers", [IN_SERVER, 2])
    def test_globals_are_kept_per_request_at_64_connections_while_requests_share_batches(
        self, tmp_path: Path, workers: int
    ) -> None:
        path = tmp_path / "model.onnx"
        onnx.save(models.iris(), path)

        async def main() -> None:
            engine = HookedEngine(Engine(asyncio.get_running_loop(), LOADERS))
            model = await engine.open(ModelSpec("m", 1, path, hooks=spec(tmp_path, self.SOURCE, workers=workers)))
            hooks = engine.hooks_of(model)

            async def connection(number: int) -> None:
                for turn in range(20):
                    n = number * 100 + turn
                    body = await hooks.predict({"n": n})
                    assert body.startswith(f"[{n},".encode()), (n, body)

            try:
                async with asyncio.timeout(60), asyncio.TaskGroup() as connections:
                    for number in range(64):
                        connections.create_task(connection(number))
                histogram = model.statistics.snapshot().rows_histogram
                assert workers or sum(histogram.counts[1:]) > 0, histogram.counts
            finally:
                await engine.retire((model,))
                await engine.stop(5)

        asyncio.run(main())


def test_a_model_kind_that_cortex_does_not_know_is_rejected(act: Act, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        hooks = HookSpec(Path(), dialect="cortex", dialect_settings={"kind": "predictor"})
        with pytest.raises(InferError, match="Cortex serves ONNX and TensorFlow models"):
            await stage.load_spec(hooks, M, node_inputs=[NODE])

    act(scene)


def test_handlers_run_in_a_front_end_from_the_model_table(act: Act, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await served(stage, spec(tmp_path, IRIS))
        stage.model.node_outputs = []
        written = json.loads(json.dumps(write_model(stage.model)))
        hooks = await Hooks.load(label(2), read_model(written))
        try:
            assert await hooks.predict(FLOWER) == b'"iris-virginica"\n'
            assert (await refusal(hooks.predict({})))[1].endswith("'sepal_length': runtime exception")
        finally:
            await hooks.close()

    act(scene)


@pytest.mark.slow
def test_a_worker_finds_the_project_at_the_path_of_cortex(act: Act, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "lib").mkdir(parents=True)
    (project / "handlers").mkdir()
    (project / "labels.json").write_text('["a", "b"]')
    (project / "encoder.py").write_text("import deep\ndef encode(x): return deep.twice(x)\n")
    (project / "lib" / "deep.py").write_text("def twice(x): return [2 * each for each in x]\n")
    source = """
        import json
        from encoder import encode

        with open("/mnt/project/labels.json") as file:
            labels = json.load(file)

        def pre_inference(sample, metadata):
            return encode(sample)

        def post_inference(prediction, metadata):
            return labels[int(prediction[0][0])]
    """

    async def scene(stage: Stage) -> None:
        handler = project / "handlers" / "handler.py"
        handler.write_text(textwrap.dedent(source))
        hooks = HookSpec(
            handler, workers=1, roots=(project, project / "lib"), mounts={"/mnt/project": str(project)},
            dialect="cortex", dialect_settings=settings("onnx"),
        )  # fmt: skip
        loaded = await served(stage, hooks, PuppetEngine(lambda x: [x[0][:, 1].astype(np.int64)], at_once=True))
        assert await loaded.predict([0, 0.5, 0, 0]) == b'"b"\n'

    act(scene)


def test_a_handler_in_the_server_imports_modules_from_its_roots(act: Act, tmp_path: Path) -> None:
    (tmp_path / "handlers").mkdir()
    (tmp_path / "encoder.py").write_text("def encode(x): return [2 * each for each in x]\n")

    async def scene(stage: Stage) -> None:
        handler = tmp_path / "handlers" / "handler.py"
        handler.write_text("from encoder import encode\ndef pre_inference(sample, metadata): return encode(sample)\n")
        hooks = HookSpec(handler, roots=(tmp_path,), dialect="cortex", dialect_settings=settings("onnx"))
        loaded = await served(stage, hooks, PuppetEngine(lambda x: [x[0][:, 1].astype(np.int64)], at_once=True))
        assert await loaded.predict([0, 3, 0, 0]) == b"[[6]]\n"

    act(scene)
