"""Dialects: they convert values around hooks and without hooks, and word the errors of hooks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.spec import HookSpec
from penstock.server.hooks.conversions import DIALECTS, ModelDescription, make_conversions
from penstock.server.hooks.packing import (
    CALL,
    CALL_HEADER,
    DONE,
    EXCEPTION,
    INFER_ERROR,
    INPUTS,
    JSON,
    PLAIN_JSON,
    REPLY_HEADER,
    STEP_GENERATOR,
    STEP_HEADER,
    write_signature,
)  # fmt: skip
from penstock.server.hooks.plan import DEFAULT_REPLICAS, LIGHT_REPLICAS, ReplicaPlan, plan_replicas
from penstock.server.hooks.worker_service import HookService, open_service
from penstock.server.ipc.errors import read_error
from tests.fakes import fake_model
from tests.server.hooks.stage import Act, Stage, refusal

ONE = Signature((TensorSpec("x", "FP32", (-1, 1)),), (TensorSpec("y", "FP32", (-1, 1)),))
LOUD: dict[str, Any] = {"signature": ONE, "dialect": "shouting", "dialect_settings": {"loudness": 10}}
BOTH = """
    def pre_inference(sample, signature, metadata):
        return sample["n"]

    def post_inference(prediction, signature, metadata):
        return {"said": prediction["heard"], "by": signature["side"]}
"""


@pytest.fixture(autouse=True)
def _shouting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("shouting", "cortex"):
        monkeypatch.setitem(DIALECTS, name, "tests.server.hooks.marking_dialect")


def x(*values: float) -> dict[str, Array]:
    return {"x": np.array(values, np.float32)[:, np.newaxis]}


class TestDefaultDialect:
    def test_each_conversion_has_its_own_signature_lists(self) -> None:
        described = ModelDescription(ONE, ONE.inputs, ONE.outputs, {}, {})
        first, second = make_conversions("", described), make_conversions("", described)
        assert first.signatures == ([*ONE.inputs], [*ONE.outputs])
        assert first.signatures[0] is not second.signatures[0]

    def test_the_default_dialect_leaves_hook_errors_unworded(self) -> None:
        assert (
            make_conversions("", ModelDescription(ONE, (), (), {}, {})).error_for("pre_inference", KeyError("x"))
            is None
        )


class TestValues:
    def test_hook_values_are_converted_by_the_dialect(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(BOTH, **LOUD)
            assert await hooks.predict({"n": 2}) == b'{"SAID": 20.0, "BY": "OUT"}!'

        act(scene)

    def test_samples_are_converted_by_the_dialect_without_pre_inference(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load("def post_inference(prediction, metadata): return prediction", **LOUD)
            assert await hooks.predict(3) == b'{"HEARD": 30.0}!'
            assert await refusal(hooks.predict("three")) == (Code.INVALID, "STR?")

        act(scene)

    def test_predictions_are_converted_by_the_dialect_without_post_inference(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load("def pre_inference(sample, metadata): return sample", **LOUD)
            assert await hooks.predict(3) == b'{"HEARD": 30.0}!'
            assert await refusal(hooks.predict("three")) == (Code.INVALID, "STR?")

        act(scene)

    def test_request_parameters_reach_every_conversion_of_the_dialect(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            expected = b'{"HEARD": 35.0, "MORE": 5}!!'
            for source in ("def pre_inference(sample, metadata): return sample",
                           "def post_inference(prediction, metadata): return prediction"):  # fmt: skip
                hooks = await stage.load(source, **LOUD)
                assert await hooks.predict(3, parameters={"more": 5}) == expected

        act(scene)

    def test_tensors_are_not_converted_without_pre_inference(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            source = "def post_inference(prediction, metadata): return prediction['heard']"
            hooks = await stage.load(source, **LOUD)
            assert (await hooks.infer(x(4, 5)))["y"] == [4]

        act(scene)

    def test_infer_uses_the_dialect_around_both_hooks_and_not_for_the_answer(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            source = """
                def pre_inference(sample, metadata):
                    return float(sample["x"].sum())

                def post_inference(prediction, metadata):
                    return {"z": prediction["heard"]}
            """
            hooks = await stage.load(source, **LOUD)
            assert (await hooks.infer(x(1, 2)))["z"] == [30]

        act(scene)

    def test_a_result_that_cannot_be_encoded_fails_with_the_error_of_the_dialect(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load("def post_inference(prediction, metadata): return object()", **LOUD)
            assert await refusal(hooks.predict(1)) == (Code.UNKNOWN, "CANNOT SAY THAT")

        act(scene)

    def test_each_replica_has_its_own_signatures(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            source = """
                def pre_inference(sample, signature, metadata):
                    signature["seen"] = signature.get("seen", 0) + 1
                    sample["began"].set()
                    sample["gate"].wait()
                    return signature["seen"]
            """
            hooks = await stage.load(source, replicas=2, **LOUD)
            assert await hooks.predict(stage.sample(is_open=True)) == b'{"HEARD": 10.0}!'
            assert await hooks.predict(stage.sample(is_open=True)) == b'{"HEARD": 20.0}!'
            first, second = stage.sample(), stage.sample(is_open=True)
            waiting = asyncio.ensure_future(hooks.predict(first))
            await asyncio.to_thread(first["began"].wait)
            assert await hooks.predict(second) == b'{"HEARD": 10.0}!'
            stage.open_all()
            assert await waiting == b'{"HEARD": 30.0}!'

        act(scene)


class TestWithoutHookFile:
    SPEC = HookSpec(Path(), dialect="shouting", dialect_settings={"loudness": 3})

    def test_samples_are_converted_by_the_dialect_without_a_hook_file(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load_spec(self.SPEC, ONE)
            assert (hooks.has_pre, hooks.has_post) == (False, False)
            assert await hooks.predict(2, parameters={"more": 1}) == b'{"HEARD": 7.0, "MORE": 1}!!'

        act(scene)

    def test_no_replicas_are_planned_without_a_hook_file(self) -> None:
        assert not self.SPEC.has_file
        assert plan_replicas(self.SPEC).replicas == 0

    def test_a_file_with_neither_hook_is_treated_as_no_file(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load("labels = []", **LOUD | {"dialect": "cortex"})
            assert await hooks.predict(2) == b'{"HEARD": 20.0}!'

        act(scene)


class TestFailures:
    WAYS = (
        "raise ValueError('no')",
        "import sys; sys.exit('no')",
        "from penstock.backends.errors import Code, InferError; raise InferError(Code.OVERLOADED, 'no')",
    )

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("form", ["def", "async def"])
    @pytest.mark.parametrize(("hook", "value"), [("pre_inference", "sample"), ("post_inference", "prediction")])
    def test_an_exception_of_a_hook_is_reported_in_the_words_of_the_dialect(
        self, act: Act, way: str, form: str, hook: str, value: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(f"{form} {hook}({value}, metadata):\n    {way}", **LOUD)
            assert await refusal(hooks.predict(1, "r1")) == (Code.INVALID, f"{hook} SAYS no")
            (answer,) = [each for each in caplog.records if "raised" in each.getMessage()]
            assert answer.exc_info is not None
            assert (answer.request_id, answer.model) == ("r1", "m")  # type: ignore[attr-defined]

        act(scene)

    def test_the_default_message_is_reported_when_the_dialect_has_none(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(BOTH, **LOUD)
            assert await refusal(hooks.predict({})) == (Code.INVALID, "pre_inference: KeyError: 'n'")

        act(scene)

    def test_the_default_message_is_reported_when_the_dialect_cannot_format_the_error(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            source = """
                class Mute(Exception):
                    def __str__(self):
                        raise RuntimeError

                def pre_inference(sample, metadata):
                    raise Mute
            """
            hooks = await stage.load(source, **LOUD)
            assert await refusal(hooks.predict(1)) == (Code.INVALID, "pre_inference: Mute")
            assert await refusal(hooks.predict(1)) == (Code.INVALID, "pre_inference: Mute")

        act(scene)

    def test_an_exception_in_a_generator_step_is_reported_in_the_words_of_the_dialect(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            source = """
                def post_inference(prediction, metadata):
                    yield {"y": prediction["heard"]}
                    raise ValueError("no")
            """
            hooks = await stage.load(source, decoupled=True, **LOUD)
            answers = hooks.stream(x(6))
            assert (await anext(answers)).outputs["y"] == [6]
            assert await refusal(anext(answers)) == (Code.INVALID, "post_inference SAYS no")
            await answers.aclose()

        act(scene)


class TestInAWorker:
    """The same in HookService, called directly; test_in_workers.py tests it in a worker."""

    @staticmethod
    def opened(folder: Path, source: str) -> HookService:
        path = folder / "hooks.py"
        path.write_text(source)
        model = fake_model(signature=ONE)
        settings = {
            "path": str(path), "roots": [], "mounts": {}, "decoupled": True, "dialect": "shouting", "model": "m",
            "dialect_settings": {"loudness": 10}, "runtime_metadata": {"key": "k"}, "inputs": [], "outputs": [],
            "signature": write_signature(model.signature), "metadata": {"map": []},
        }  # fmt: skip
        nobody: Any = None
        return open_service(settings, nobody)

    @staticmethod
    def called(
        service: HookService, hook_index: int, conversion: int, value: bytes, **parameters: Any
    ) -> tuple[int, bytes, Any]:
        encoded = json.dumps(parameters).encode()
        arrays: list[Array | None] = [np.full((1, 1), 3, np.float32)] if hook_index else []
        outcome = 2 if hook_index else PLAIN_JSON
        body = (
            CALL_HEADER.pack(hook_index, conversion, outcome, len(encoded), 1)
            + encoded
            + (b"" if hook_index else value)
        )
        reply, tensors = service.call(CALL, 0, body, arrays)
        return REPLY_HEADER.unpack_from(reply)[0], reply[REPLY_HEADER.size :], tensors

    def test_values_are_converted_by_the_dialect_with_the_parameters(self, tmp_path: Path) -> None:
        source = (
            "def pre_inference(sample, signature, metadata): return sample + len(signature)\n"
            "def post_inference(prediction, signature, metadata): return [prediction, signature]\n"
        )
        service = self.opened(tmp_path, source)
        try:
            has = json.loads(service.on_open()[0])
            assert (has["takes"], has["keeps"]) == ([True, True], False)
            outcome, _, (array,) = self.called(service, 0, INPUTS, b"4", more=5)
            assert (outcome, array.tolist()) == (DONE, [[65]])
            outcome, text, _ = self.called(service, 1, JSON, b"", more=5)
            assert (outcome, text) == (DONE, b'[{"HEARD": 3.0, "MORE": 5}, {"SIDE": "OUT"}]!!')
        finally:
            service.close()

    def test_an_exception_is_sent_in_the_words_of_the_dialect_with_its_traceback(self, tmp_path: Path) -> None:
        source = (
            "def pre_inference(sample, metadata): raise ValueError('no')\n"
            "def post_inference(prediction, metadata): raise SystemExit('no')\n"
        )
        service = self.opened(tmp_path, source)
        try:
            for hook_index, hook, conversion in ((0, "pre_inference", INPUTS), (1, "post_inference", JSON)):
                outcome, text, _ = self.called(service, hook_index, conversion, b"4")
                message, _, lines, worded = json.loads(text)
                assert (outcome, message.endswith("no")) == (EXCEPTION, True)
                assert lines.startswith("Traceback")
                error = read_error(worded)
                assert (error.code, error.message, error.retry_after_ns) == (Code.INVALID, f"{hook} SAYS no", 7)
        finally:
            service.close()

    def test_a_failed_conversion_is_not_reported_as_a_hook_exception(self, tmp_path: Path) -> None:
        service = self.opened(tmp_path, "def pre_inference(sample, metadata): return sample\n")
        try:
            outcome, text, _ = self.called(service, 0, INPUTS, b'"four"')
            assert (outcome, read_error(text).message) == (INFER_ERROR, "STR?")
        finally:
            service.close()

    def test_an_exception_in_a_generator_step_is_sent_in_the_words_of_the_dialect(self, tmp_path: Path) -> None:
        source = "def post_inference(prediction, metadata):\n    yield from ()\n    raise InterruptedError('no')\n"
        service = self.opened(tmp_path, source)
        try:
            body = STEP_HEADER.pack(1, 1, JSON, 8, 1 << 20) + CALL_HEADER.pack(1, JSON, 2, 0, 1)
            reply, _ = service.call(STEP_GENERATOR, 0, body, [np.zeros((1, 1), np.float32)])
            assert REPLY_HEADER.unpack_from(reply)[0] == EXCEPTION
            assert read_error(json.loads(reply[REPLY_HEADER.size :])[3]).message == "post_inference SAYS no"
        finally:
            service.close()


def test_a_failed_conversion_after_a_hook_is_not_attributed_to_the_hook(act: Act) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(BOTH, **LOUD)
        with pytest.raises(InferError) as refused:
            await hooks.predict({"n": "two"})
        assert refused.value.message == "STR?"

    act(scene)


class TestReplicaPlan:
    """The plan for a dialect that promises one request at a time per replica."""

    @staticmethod
    def planned(folder: Path, name: str, source: str) -> ReplicaPlan:
        path = folder / name
        path.write_text(source)
        return plan_replicas(HookSpec(path, dialect="cortex"))

    def test_hooks_without_state_share_one_replica(self, tmp_path: Path) -> None:
        found = self.planned(tmp_path, "hooks.py", "def pre_inference(sample, metadata): return sample['x']\n")
        assert (found.shared, found.replicas) == (True, 1)

    def test_hooks_that_write_globals_have_several_replicas_and_more_if_light(self, tmp_path: Path) -> None:
        source = "n = 0\ndef pre_inference(sample, metadata):\n    global n\n    n = sample\n    return n\n"
        found = self.planned(tmp_path, "hooks.py", source)
        assert (found.shared, found.replicas, found.max_light, found.is_exclusive) == (
            False,
            DEFAULT_REPLICAS,
            LIGHT_REPLICAS,
            False,
        )

    def test_hooks_that_affect_the_whole_process_have_one_replica(self, tmp_path: Path) -> None:
        found = self.planned(tmp_path, "hooks.pickle", "")
        assert (found.shared, found.replicas, found.max_light, found.is_exclusive) == (False, 1, 0, False)

    def test_hooks_that_write_to_disk_have_one_exclusive_replica(self, tmp_path: Path) -> None:
        source = "def pre_inference(sample, metadata):\n    open('/tmp/last', 'w').write(sample)\n    return sample\n"
        found = self.planned(tmp_path, "hooks.py", source)
        assert (found.shared, found.replicas, found.is_exclusive) == (False, 1, True)
