from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.request import RequestOptions
from penstock.server.hooks.plan import DEFAULT_REPLICAS
from penstock.server.hooks.replicas import MAX_HANGING
from tests.server.hooks.stage import GUARD_S, Act, PuppetEngine, Stage, is_set, refusal


class ThreadRecorder:
    """A number that records the threads that convert it."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __float__(self) -> float:
        self.threads.add(threading.get_ident())
        return 1.0


SEED_003 = """
    import numpy as np
    labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]
    def pre_inference(sample, signature, metadata):
        # Convert the request payload to a flattened list
        return {signature[0].name: [
            sample["sepal_length"], sample["sepal_width"], sample["petal_length"], sample["petal_width"],
        ]}
    def post_inference(prediction, signature, metadata):
        # Respond with a string label
        predicted_class_id = prediction[0][0]
        return labels[predicted_class_id]
"""
SEED_004 = """
    import numpy as np
    labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]
    def pre_inference(sample, metadata):
        return {metadata[0].name: [
            sample["sepal_length"], sample["sepal_width"], sample["petal_length"], sample["petal_width"],
        ]}
    def post_inference(prediction, metadata):
        probabilites = prediction[0][0]
        predicted_class_id = int(np.argmax(probabilites))
        return {
            "class_label": labels[predicted_class_id],
            "class_index": predicted_class_id,
            "probabilities": probabilites,
        }
"""
# The events that a test waits for or holds back are in the sample, since hooks run in this process.
GATED = """
    def pre_inference(sample, metadata):
        sample["began"].set()
        sample["gate"].wait()
        return [sample["x"]] * 4
"""
PLAIN = """
    def pre_inference(sample, metadata): return [sample["x"]] * 4
    def post_inference(prediction, metadata): return prediction[0][0, 0]
"""
REMEMBERS = """
    current = None
    def pre_inference(sample, metadata):
        global current
        current = sample
        return [sample["x"]] * 4
    def post_inference(prediction, metadata):
        return [current["x"], prediction[0][0, 0]]
"""
IRIS = {"sepal_length": 5.2, "sepal_width": 3.6, "petal_length": 1.4, "petal_width": 0.3}


def _later_ns() -> int:
    """Give a time at which every hook that runs now is past its limit of 30 s."""
    return time.monotonic_ns() + 31_000_000_000


def _iris(*outputs: TensorSpec) -> Signature:
    return Signature((TensorSpec("input", "FP32", (-1, 4)),), outputs, batched=True)


class TestAnswers:
    def test_the_iris_hooks_of_the_seeds_give_their_original_answers(self, act: Act) -> None:
        label, scores = np.array([0]), np.array([[0.75, 0.25, 0]], np.float32)
        specs = TensorSpec("label", "INT64", (-1,)), TensorSpec("probabilities", "FP32", (-1, 3))

        async def scene(stage: Stage) -> None:
            later = await stage.load(SEED_003, PuppetEngine(lambda _: [label, scores], at_once=True), _iris(*specs))
            earlier = await stage.load(
                SEED_004, PuppetEngine(lambda _: [scores, label], at_once=True), _iris(*specs[::-1])
            )

            assert await later.predict(IRIS) == b'"iris-setosa"'
            assert await earlier.predict(IRIS) == (
                b'{"class_label":"iris-setosa","class_index":0,"probabilities":[0.75,0.25,0.0]}'
            )

        act(scene)

    @pytest.mark.parametrize("kind", ["", "async "])
    def test_an_idle_replica_keeps_no_arrays_of_a_request(self, act: Act, kind: str) -> None:
        source = f"{kind}def pre_inference(sample, metadata): return sample['x'] * 1\n"
        source += f"{kind}def post_inference(prediction, metadata): return prediction\n"

        async def scene(stage: Stage) -> None:
            body, outputs = np.ones((1, 4), np.float32), [np.ones((1, 4), np.float32)]
            refs = ref(body), ref(outputs[0])
            engine = PuppetEngine(lambda _: [outputs.pop()], at_once=True)
            await (await stage.load(source, engine)).infer({"x": body})
            del body
            async with asyncio.timeout(GUARD_S):
                while refs[0]() is not None or refs[1]() is not None:  # noqa: ASYNC110 - by that instance's thread
                    await asyncio.sleep(0.001)

        act(scene)

    def test_pre_inference_gets_the_input_signature_and_post_inference_the_output_signature(self, act: Act) -> None:
        source = """
            def pre_inference(sample, signature, metadata):
                metadata["pre"] = [type(signature).__name__, signature[0].name]
                return [1, 2, 3, 4]
            def post_inference(prediction, signature, metadata):
                return [metadata, type(signature).__name__, signature[0].name]
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source, metadata={"k": [1]})

            assert await hooks.predict(None) == b'[{"k":[1],"pre":["list","x"]},"list","y"]'

        act(scene)

    def test_either_hook_can_be_missing(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            neither = await stage.load(None)
            pre = await stage.load("def pre_inference(sample, metadata): return [sample] * 4")
            post = await stage.load("def post_inference(prediction, metadata): return float(prediction[0].sum())")

            assert await neither.predict([1, 2, 3, 4]) == b"[[[1.0,2.0,3.0,4.0]]]"
            assert await neither.predict({"x": [[1, 2, 3, 4]] * 2}) == b"[[[1.0,2.0,3.0,4.0],[1.0,2.0,3.0,4.0]]]"
            assert await pre.predict(2) == b"[[[2.0,2.0,2.0,2.0]]]"
            assert await post.predict([1, 2, 3, 4]) == b"10.0"
            assert (neither.has_pre, pre.has_pre, post.has_pre) == (False, True, False)
            assert (neither.has_post, pre.has_post, post.has_post) == (False, False, True)
            assert (await refusal(neither.predict([1]))) == (
                Code.INVALID,
                "input 'x' takes FP32 [-1,4]: found an array of shape [1]",
            )

        act(scene)

    def test_large_samples_without_hooks_are_converted(self, act: Act) -> None:
        signature = Signature(
            (TensorSpec("x", "FP32", (-1, 3, -1)),), (TensorSpec("y", "FP32", (-1, -1)),), batched=True
        )

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(None, PuppetEngine(lambda inputs: [inputs[0][:, 0]], at_once=True), signature)
            for length, is_large in ((5, False), (5000, True)):
                first = ThreadRecorder()
                sample = [[[first, *[1.0] * (length - 1)], *[[1.0] * length] * 2]]
                answer = await hooks.predict({"x": sample})

                assert answer == b"[[[" + b",".join([b"1.0"] * length) + b"]]]"
                assert bool(first.threads - {threading.get_ident()}) is is_large

        act(scene)

    def test_async_hooks_share_a_loop_that_runs_on_between_calls(self, act: Act) -> None:
        source = """
            import asyncio
            tasks = []
            async def keep(sample):
                while True:
                    await asyncio.sleep(0)
                    sample["began"].set()
            async def pre_inference(sample, metadata):
                await asyncio.sleep(0)
                tasks.append(asyncio.create_task(keep(sample)))
                return [sample["x"]] * 4
            def post_inference(prediction, metadata):
                return [prediction[0][0, 0], len(tasks), tasks[0].done()]
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source, replicas=1)
            sample = stage.sample(1)

            assert await hooks.predict(sample) == b"[1.0,1,false]"
            await is_set(sample["began"])
            assert await hooks.predict(stage.sample(2)) == b"[2.0,2,false]"

        act(scene)

    def test_infer_passes_tensors_as_a_dict_and_returns_the_result_of_post_inference(self, act: Act) -> None:
        source = """
            def pre_inference(sample, metadata): return {"x": sample["x"] * 2}
            def post_inference(prediction, metadata): return {"label": "big", "sum": prediction[0].sum(axis=1)}
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source)
            answer = await hooks.infer({"x": np.ones((2, 4), np.float32)})
            bare = await (await stage.load(None)).infer({"x": np.ones((2, 4), np.float32)})

            assert {name: array.tolist() for name, array in answer.items()} == {"label": [b"big"], "sum": [8.0, 8.0]}
            assert {name: array.tolist() for name, array in bare.items()} == {"y": [[1.0] * 4] * 2}

        act(scene)

    def test_a_result_that_is_not_a_tensor_is_rejected_only_by_infer(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load("def post_inference(prediction, metadata): return {'a': {'b': 1}}")
            code, text = await refusal(hooks.infer({"x": np.ones((1, 4), np.float32)}))

            assert await hooks.predict([1, 2, 3, 4]) == b'{"a":{"b":1}}'
            assert code is Code.INVALID
            assert text.startswith("post_inference returned 'a' as a dict, which is not a tensor")

        act(scene)


class TestPromise:
    def test_globals_are_safe_while_requests_share_batches(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine)
            calls = [asyncio.create_task(hooks.predict({"x": x})) for x in range(64)]
            for _ in range(64 // DEFAULT_REPLICAS):
                await engine.gather(DEFAULT_REPLICAS)
                engine.run()

            assert await asyncio.gather(*calls) == [b"[%d,%d.0]" % (x, x) for x in range(64)]
            assert engine.sizes == [DEFAULT_REPLICAS] * (64 // DEFAULT_REPLICAS)

        act(scene)

    def test_one_replica_handles_one_request_from_pre_to_post(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine, replicas=1)
            calls = [asyncio.create_task(hooks.predict({"x": x})) for x in range(5)]
            for _ in range(5):
                await engine.gather(1)
                assert engine.waiting == 1
                engine.run()

            assert await asyncio.gather(*calls) == [b"[%d,%d.0]" % (x, x) for x in range(5)]

        act(scene)

    def test_a_buffer_returned_by_pre_inference_is_not_reused_before_the_model_reads_it(self, act: Act) -> None:
        source = """
            import numpy as np
            buffer = np.zeros((1, 4), np.float32)
            def pre_inference(sample, metadata):
                buffer[:] = sample
                return buffer
        """

        async def scene(stage: Stage) -> None:
            engine = PuppetEngine(lambda inputs: [inputs[0].copy()])
            hooks = await stage.load(source, engine, replicas=2)
            calls = [asyncio.create_task(hooks.predict(x)) for x in range(4)]
            for _ in range(2):
                await engine.gather(2)
                engine.run()

            assert await asyncio.gather(*calls) == [b"[[[%d.0,%d.0,%d.0,%d.0]]]" % (x, x, x, x) for x in range(4)]

        act(scene)

    def test_a_module_without_writes_is_one_replica_that_runs_one_call_at_a_time(self, act: Act) -> None:
        source = """
            import threading
            import numpy as np
            one_at_a_time = threading.Lock()
            instance = object()
            def pre_inference(sample, metadata):
                if not one_at_a_time.acquire(blocking=False):
                    raise RuntimeError("two at a time")
                try:
                    return np.full(4, sample)
                finally:
                    one_at_a_time.release()
            def post_inference(prediction, metadata):
                if not one_at_a_time.acquire(blocking=False):
                    raise RuntimeError("two at a time")
                try:
                    return [id(instance), prediction[0][0, 0]]
                finally:
                    one_at_a_time.release()
        """

        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(source, engine)
            calls = [asyncio.create_task(hooks.predict(x)) for x in range(64)]
            await engine.gather(64)
            engine.run()
            answers = [answer.strip(b"[]").split(b",") for answer in await asyncio.gather(*calls)]

            assert [answer[1] for answer in answers] == [b"%d.0" % x for x in range(64)]
            assert len({answer[0] for answer in answers}) == 1
            assert engine.sizes == [64]

        act(scene)

    def test_a_configured_number_of_replicas_overrides_the_analysis(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine, replicas="shared")
            calls = [asyncio.create_task(hooks.predict({"x": x})) for x in range(20)]
            await engine.gather(20)
            engine.run()

            assert {answer.split(b",")[0] for answer in await asyncio.gather(*calls)} == {b"[19"}

        act(scene)

    def test_each_replica_keeps_one_metadata_object(self, act: Act) -> None:
        source = """
            def pre_inference(sample, signature, metadata):
                metadata["calls"] = metadata.get("calls", 0) + 1
                return [0] * 4
            def post_inference(prediction, signature, metadata): return metadata["calls"]
        """

        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(source, engine, replicas=2)
            for expected in (b"1", b"2"):
                calls = [asyncio.create_task(hooks.predict(0)) for _ in range(2)]
                await engine.gather(2)
                engine.run()

                assert await asyncio.gather(*calls) == [expected] * 2

        act(scene)


class TestFailures:
    def test_an_exception_of_pre_inference_is_reported_only_to_its_client(
        self, act: Act, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(PLAIN)
            answers = await asyncio.gather(
                hooks.predict({"x": 1}), hooks.predict({"y": 1}, "id7"), hooks.predict({"x": 3}), return_exceptions=True
            )

            assert (answers[0], answers[2]) == (b"1.0", b"3.0")
            assert isinstance(answers[1], InferError)
            assert (answers[1].code, answers[1].message) == (Code.INVALID, "pre_inference: KeyError: 'x'")
            assert isinstance(answers[1].__cause__, KeyError)

        act(scene)
        (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert record.__dict__["request_id"] == "id7"
        assert "hooks.py" in caplog.text

    def test_an_exception_of_post_inference_is_logged_and_its_client_gets_a_request_id(
        self, act: Act, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = "def post_inference(prediction, metadata): raise ValueError('secret')"

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source)
            code, text = await refusal(hooks.predict([0] * 4, "id8"))

            assert (code, text) == (
                Code.INTERNAL, "post_inference failed; see the server log, request id id8",
            )  # fmt: skip
            _, text = await refusal(hooks.predict([0] * 4))
            assert text.rpartition(" ")[2] in {record.__dict__["request_id"] for record in caplog.records[1:]}

        act(scene)
        assert "secret" in caplog.text

    def test_the_logged_traceback_begins_in_the_hook_file(self, act: Act, caplog: pytest.LogCaptureFixture) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load("def post_inference(prediction, metadata): raise ValueError")
            await refusal(hooks.predict([0] * 4))

        act(scene)
        (frames,) = [record.exc_info[2] for record in caplog.records if record.exc_info]
        assert frames is not None
        assert [Path(frame.filename).name for frame in traceback.extract_tb(frames)] == ["hooks.py"]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_the_module_name_of_hooks_contains_the_model_name(self, act: Act, workers: int) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load("def post_inference(prediction, metadata): return __name__", workers=workers)

            assert re.fullmatch(rb'"m@\d+\.hooks"', await hooks.predict([0] * 4))

        act(scene)

    @pytest.mark.parametrize("raised", ["sys.exit(3)", "raise KeyboardInterrupt", "raise GeneratorExit"])
    @pytest.mark.parametrize("form", ["def", "async def"])
    def test_an_exit_exception_fails_only_its_own_request(self, act: Act, raised: str, form: str) -> None:
        source = f"""
            import sys
            {form} pre_inference(sample, metadata):
                if sample is None:
                    {raised}
                return [sample] * 4
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source)
            code, text = await refusal(hooks.predict(None))

            assert code is Code.INTERNAL
            assert text.startswith("pre_inference failed")
            assert await hooks.predict(1) == b"[[[1.0,1.0,1.0,1.0]]]"

        act(scene)

    def test_an_infer_error_raised_by_a_hook_reaches_the_client(self, act: Act) -> None:
        source = """
            from penstock.backends.errors import Code, InferError
            def post_inference(prediction, metadata): raise InferError(Code.UNSUPPORTED, "no cats")
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source)

            assert await refusal(hooks.predict([0] * 4)) == (Code.UNSUPPORTED, "no cats")

        act(scene)

    def test_a_hook_result_that_does_not_fit_the_model_or_json_is_rejected(self, act: Act) -> None:
        source = """
            def pre_inference(sample, metadata): return sample
            def post_inference(prediction, metadata): return b"bytes"
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source)

            message = 'pre_inference returned a value that the model cannot take: missing key "x", found "z"'
            assert await refusal(hooks.predict({"z": 1})) == (Code.INVALID, message)
            code, text = await refusal(hooks.predict([1, 2, 3, 4]))
            assert code is Code.INTERNAL
            assert "bytes" in text

        act(scene)

    @pytest.mark.parametrize("replicas", [1, "shared"])
    def test_a_hook_that_times_out_fails_its_request_and_a_new_replica_serves_the_others(
        self, act: Act, caplog: pytest.LogCaptureFixture, replicas: int | str
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(GATED, replicas=replicas)
            stuck = stage.sample()
            hanging = asyncio.create_task(hooks.predict(stuck))
            await is_set(stuck["began"])
            waiting = [asyncio.create_task(hooks.predict(stage.sample(x, is_open=True))) for x in range(4)]
            await asyncio.sleep(0)
            hooks.enforce_limits(_later_ns())

            assert await refusal(hanging) == (
                Code.EXPIRED,
                "pre_inference of model 'm' took longer than its limit of 30 s",
            )
            assert await asyncio.gather(*waiting) == [b"[[[%d.0,%d.0,%d.0,%d.0]]]" % (x, x, x, x) for x in range(4)]

        act(scene)
        assert "took longer than its limit" in caplog.text

    def test_a_hook_that_spins_is_interrupted_when_it_times_out(self, act: Act) -> None:
        source = """
            def pre_inference(sample, metadata):
                try:
                    while True:
                        pass
                finally:
                    sample["gate"].set()
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source, timeout_s=0.01)
            sample = stage.sample()

            assert (await refusal(hooks.predict(sample)))[0] is Code.EXPIRED
            await is_set(sample["gate"])

        act(scene)

    def test_an_async_hook_is_cancelled_when_it_times_out(self, act: Act) -> None:
        source = """
            import asyncio
            async def pre_inference(sample, metadata):
                if sample["x"]:
                    return [sample["x"]] * 4
                sample["began"].set()
                try:
                    await asyncio.Event().wait()
                finally:
                    sample["gate"].set()
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source)
            sample = stage.sample()
            call = asyncio.create_task(hooks.predict(sample))
            await is_set(sample["began"])
            hooks.enforce_limits(_later_ns())

            assert (await refusal(call))[0] is Code.EXPIRED
            await is_set(sample["gate"])
            assert await hooks.predict(stage.sample(1)) == b"[[[1.0,1.0,1.0,1.0]]]"

        act(scene)

    def test_the_time_limit_counts_from_the_start_of_a_hook(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(GATED)
            before_ns = time.monotonic_ns()
            sample, next_one = stage.sample(1), stage.sample(2)
            calls = [asyncio.create_task(hooks.predict(each)) for each in (sample, next_one)]
            await is_set(sample["began"])
            hooks.enforce_limits(before_ns + 30_000_000_000)
            sample["gate"].set()
            await is_set(next_one["began"])
            hooks.enforce_limits(before_ns + 30_000_000_000)
            next_one["gate"].set()

            assert len(await asyncio.gather(*calls)) == 2

        act(scene)

    def test_requests_are_rejected_at_the_limit_of_hanging_hooks_until_the_hooks_end(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(GATED)
            for _ in range(MAX_HANGING):
                stuck = stage.sample()
                call = asyncio.create_task(hooks.predict(stuck))
                await is_set(stuck["began"])
                hooks.enforce_limits(_later_ns())
                assert (await refusal(call))[0] is Code.EXPIRED
            fine = stage.sample(1, is_open=True)

            assert await refusal(hooks.predict(fine)) == (
                Code.OVERLOADED,
                f"{MAX_HANGING} hooks of model 'm' hang past their limit",
            )
            hanging = [thread for thread in threading.enumerate() if thread.name == "hooks-m/1"]
            stage.open_all()
            for thread in hanging:
                await asyncio.to_thread(thread.join, GUARD_S)
            assert await hooks.predict(fine) == b"[[[1.0,1.0,1.0,1.0]]]"

        act(scene)

    def test_a_file_that_cannot_be_reloaded_is_reported_without_its_path(
        self, act: Act, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(GATED)
            path = stage._folder / "hooks.py"
            path.write_text("import nothing_of_that_name")
            stuck = stage.sample()
            call = asyncio.create_task(hooks.predict(stuck))
            await is_set(stuck["began"])
            hooks.enforce_limits(_later_ns())
            assert (await refusal(call))[0] is Code.EXPIRED

            reason = "cannot be loaded: ModuleNotFoundError: No module named 'nothing_of_that_name'"
            refused = await refusal(hooks.predict(stage.sample(1, is_open=True)))
            assert refused == (Code.NOT_READY, f"hooks file hooks.py {reason}")
            assert any(f"hooks file {path} {reason}" in message for message in caplog.messages)

        act(scene)

    def test_a_replica_whose_thread_dies_is_replaced(self, act: Act) -> None:
        source = """
            import asyncio, sys
            async def end(): sys.exit(1)
            async def pre_inference(sample, metadata):
                if sample is None:
                    asyncio.create_task(end()).add_done_callback(lambda task: task.exception())
                    await asyncio.Event().wait()
                return [sample] * 4
        """

        async def scene(stage: Stage) -> None:
            for replicas in (1, "shared"):
                hooks = await stage.load(source, replicas=replicas)

                assert (await refusal(hooks.predict(None)))[0] is Code.INTERNAL
                assert await hooks.predict(1) == b"[[[1.0,1.0,1.0,1.0]]]"

        act(scene)

    def test_existing_replicas_keep_serving_when_the_file_cannot_be_reloaded(self, act: Act, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine)
            (tmp_path / "hooks.py").write_text("1 / 0")
            calls = [asyncio.create_task(hooks.predict({"x": x})) for x in range(3)]
            for _ in range(3):
                await engine.gather(1)
                engine.run()

            assert await asyncio.gather(*calls) == [b"[%d,%d.0]" % (x, x) for x in range(3)]

        act(scene)


class TestQueue:
    @pytest.mark.parametrize("replicas", [1, "shared"])
    def test_requests_beyond_the_queue_limit_are_rejected(self, act: Act, replicas: int | str) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(GATED, replicas=replicas, max_queue_rows=3)
            samples = [stage.sample(x) for x in range(6)]
            calls = [asyncio.create_task(hooks.predict(sample)) for sample in samples]
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            for sample in samples:
                sample["gate"].set()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, InferError)]

            assert done
            assert refused != []
            assert len(refused) == (3 if replicas == "shared" else 2)
            assert {(error.code, error.message) for error in refused} == {
                (Code.OVERLOADED, "3 requests wait for the hooks of model 'm', which is the limit")
            }

        act(scene)

    def test_a_request_that_is_cancelled_while_queued_never_starts(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(GATED, replicas=1)
            first, second, third = (stage.sample(x) for x in range(3))
            calls = [asyncio.create_task(hooks.predict(sample)) for sample in (first, second, third)]
            await is_set(first["began"])
            calls[1].cancel()
            first["gate"].set()
            await is_set(third["began"])
            third["gate"].set()
            answers = await asyncio.gather(*calls, return_exceptions=True)

            assert isinstance(answers[1], asyncio.CancelledError)
            assert answers[2] == b"[[[2.0,2.0,2.0,2.0]]]"
            assert not second["began"].is_set()

        act(scene)

    def test_a_replica_is_freed_only_when_its_hook_has_ended(self, act: Act) -> None:
        source = """
            running = 0
            def pre_inference(sample, metadata):
                global running
                running += 1
                sample["overlap"] = running > 1
                sample["began"].set()
                sample["gate"].wait()
                running -= 1
                return [0] * 4
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source, replicas=1)
            cancelled, next_one = stage.sample(), stage.sample()
            call = asyncio.create_task(hooks.predict(cancelled))
            await is_set(cancelled["began"])
            call.cancel()
            following = asyncio.create_task(hooks.predict(next_one))
            await asyncio.gather(call, return_exceptions=True)
            assert not next_one["began"].is_set()
            cancelled["gate"].set()
            next_one["gate"].set()
            await following

            assert next_one["overlap"] is False

        act(scene)

    def test_a_cancelled_request_in_the_model_frees_its_replica(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine, replicas=1)
            cancelled = asyncio.create_task(hooks.predict({"x": 1}))
            await engine.gather(1)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            engine.run()
            following = asyncio.create_task(hooks.predict({"x": 2}))
            await engine.gather(1)
            engine.run()

            assert await following == b"[2,2.0]"

        act(scene)

    @pytest.mark.parametrize("replicas", [1, "shared"])
    def test_a_request_expires_when_its_deadline_passes_while_queued(self, act: Act, replicas: int | str) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(GATED, replicas=replicas)
            first, late = stage.sample(), stage.sample()
            call = asyncio.create_task(hooks.predict(first))
            await is_set(first["began"])
            expired = asyncio.create_task(hooks.predict(late, "", RequestOptions(deadline_ns=time.monotonic_ns())))
            if replicas == "shared":
                first["gate"].set()

            assert await refusal(expired) == (Code.EXPIRED, "Request timeout expired")
            assert not late["began"].is_set()
            first["gate"].set()
            await call

        act(scene)

    def test_closing_the_hooks_finishes_accepted_requests(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine, replicas=1)
            calls = [asyncio.create_task(hooks.predict({"x": x})) for x in range(3)]
            await engine.gather(1)
            closing = asyncio.create_task(hooks.close())
            await asyncio.sleep(0)
            assert (await refusal(hooks.predict({"x": 9})))[0] is Code.NOT_READY
            for _ in range(3):
                await engine.gather(1)
                engine.run()

            assert await asyncio.gather(*calls) == [b"[%d,%d.0]" % (x, x) for x in range(3)]
            await closing

        act(scene)


class TestLoad:
    @pytest.mark.parametrize(
        ("source", "options", "text"),
        [
            ("def pre_inference(p, metadata): pass", {}, "but found (p, metadata)"),
            ("x = 1", {}, "defines neither pre_inference nor post_inference"),
            ("def f(:", {}, "line 1: invalid syntax"),
            ("1 / 0", {}, "cannot be loaded: ZeroDivisionError: division by zero"),
            (PLAIN, {"replicas": 0}, 'replicas: got 0, takes an integer above 0 or "shared"'),
            (PLAIN, {"replicas": "many"}, "replicas: got 'many'"),
        ],
    )
    def test_a_faulty_file_or_configuration_fails_the_load(
        self, act: Act, source: str, options: dict[str, Any], text: str
    ) -> None:
        async def scene(stage: Stage) -> None:
            code, message = await refusal(stage.load(source, **options))

            assert code is Code.INVALID
            assert text in message

        act(scene)

    def test_the_reason_for_the_number_of_replicas_is_logged(self, act: Act, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)

        async def scene(stage: Stage) -> None:
            await stage.load(REMEMBERS)
            await stage.load(PLAIN)

        act(scene)
        assert "up to 8 instances: globals are written: current (hooks.py:4)" in caplog.text
        assert "one instance for all requests: globals are never written" in caplog.text

    def test_hook_seconds_and_failures_are_counted(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(PLAIN)
            await hooks.predict({"x": 1})
            await refusal(hooks.predict({}))
            counted = stage.model.statistics.snapshot()

            assert {name: histogram.count for name, histogram in counted.hook_histograms.items()} == {
                "pre": 2,
                "post": 1,
            }
            assert counted.failures["OTHER"] == 1

        act(scene)
