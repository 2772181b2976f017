"""Nonblocking hooks: only hooks that can neither wait nor run long are run by the event loop itself."""

from __future__ import annotations

import ast
import asyncio
import logging
import textwrap
import time
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.hooks import replica, replicas
from penstock.server.hooks.loading import POST, PRE
from penstock.server.hooks.nonblocking import is_nonblocking
from penstock.server.hooks.plain_values import MAX_SMALL_BYTES, are_small_tensors, is_small
from penstock.server.hooks.runner import Hooks
from tests.server.hooks.stage import Act, PuppetEngine, Stage

PLAIN = """
    labels = ["a", "b", "c"]
    def pre_inference(sample, metadata): return [sample["x"]] * 4
    def post_inference(prediction, metadata): return labels[int(prediction[0][0, 0])]
"""


def compile_hook(source: str) -> tuple[Any, ast.Module]:
    """Give the function `hook` of a file, and the file's syntax tree."""
    source = textwrap.dedent(source)
    names: dict[str, Any] = {"__name__": "hooks"}
    exec(compile(source, "hooks.py", "exec", dont_inherit=True), names)
    return names["hook"], ast.parse(source)


def is_nonblocking_source(source: str) -> bool:
    return is_nonblocking(*compile_hook(source))


@pytest.mark.parametrize(
    "body",
    [
        "return {metadata[0].name: [sample['a'], sample['b'], float(sample['c'])]}",
        "return labels[int(np.argmax(sample[0]))]",
        "return {'label': labels[sample[0].argmax()], 'all': sample[0].tolist(), 'shape': sample[0].shape}",
        "e = np.exp(sample - np.max(sample))\n    return e / e.sum()",
        "return [float(value) / 255 for value in sample['pixels'] if value is not None]",
        "return [[float(value) for value in row] for row in sample]",
        "return [value ** 2 for value in sample]",
        "return [f'{value:.2f} {labels[0]}' for value in sample if str(value) != value.lower()]",
        "return [(value - sample[0]) / len(sample) for value in sample]",
        "return [f'{many[at]}: {value:.2f}' for at, value in enumerate(sample)]",
        "n = len(sample)\n    return [(mean[0] % n, (value + 1) % n, form % value) for value in sample]",
        "return {name: round(float(value), 4) for name, value in zip(labels, sample[0])}",
        "return sorted(zip(sample[0].tolist(), labels), reverse=True)[:2]",
        "out = []\n    out.append(sample['a'])\n    return np.array(out, dtype=np.float32)",
        "result = {'a': sample['a']}\n    result['b'] = np.where(sample['b'] > 0, 1, 0)\n    return result",
        "if 'a' not in sample:\n        raise ValueError(f'no a: {sample!r:.80}')\n    return scaled(sample['a'])",
        "text: str = sample['text'].strip().lower()\n    return text.split(' ')",
        "return math.exp(-sample['x']) if sample['x'] > math.pi else scaled(sample['x'], by=3)",
        "assert isinstance(sample, list), 'a list'\n    return sum(sample) / len(sample)",
        "return [sample[at] for at in range(len(sample))]",
        "return ', '.join(labels) + str(mean[0]) + '%d' % len(sample)",
    ],
)
def test_a_hook_that_only_computes_and_looks_up_values_is_nonblocking(body: str) -> None:
    assert is_nonblocking_source(f"""
import math
import numpy as np
labels = ["a", "b", "c"]
form = "%s"
many = list(range(1000))
mean = np.array([0.5, 0.25])
def scaled(value, by=2.0):
    return value * by
def hook(sample, metadata):
    {body}
""")


@pytest.mark.parametrize(
    "body",
    [
        "time.sleep(1)",
        "return requests_like.get(sample['url'])",
        "return tools[0].encode(sample)",
        "return open(sample['path'])",
        "print(sample)",
        "log.info(sample)",
        "while True: pass",
        "for value in sample: sample.append(value)",
        "return [sample.append(value) for value in sample]",
        "return hook(sample, metadata)",
        "return np.zeros(sample['n'])",
        "return np.load(sample['path'])",
        "return np.random.rand(3)",
        "return list(range(sample['n']))",
        "return [a * b for a in sample for b in metadata]",
        "return [a for _ in sample for a in sample]",
        "return [helper(a) for a in sample]",
        "return [sum(sample) for _ in sample]",
        "return [str(sample) for _ in sample]",
        "return [f'{value} of {sample}' for value in sample]",
        "return ['%s of %s' % (value, sample) for value in sample]",
        "return [form % (value, sample) for value in sample]",
        "return [forms[0] % (value, sample) for value in sample]",
        "form = '%s of %s'\n    return [form % (value, sample) for value in sample]",
        "form: str = labels[0]\n    return [('%s ' + form) % (value, sample) for value in sample]",
        "return ['{} of {}'.format(value, sample) for value in sample]",
        "return [value.join(sample) for value in sample]",
        "return [f'{value} of {many}' for value in sample]",
        "return [many.index(value) for value in sample]",
        "return [sample.copy() for _ in sample]",
        "return [sample['rows'].index(value) for value in sample['values']]",
        "return sample['base'] ** sample['n']",
        "sample **= 99",
        "sample[0] *= 2\n    return sample",
        "sample += 1\n    return sample",
        "sample[0][0] = 1\n    return sample",
        "own = sample\n    own[0] = 1",
        "own = [1]\n    own = sample\n    own[0] = 1",
        "own = [sample]\n    own[0][0] = 1",
        "sample.append(1)\n    return sample",
        "np.exp(sample, sample)",
        "np.maximum(sample, 0, sample)",
        "np.exp(sample, out=sample)",
        "return np.sum(*sample, **metadata)",
        "return 1 << sample",
        "return sample @ sample",
        "return sample.set()",
        "return sample.name()",
        "return (lambda value: value)(sample)",
        "return labels[0](sample)",
        "len = sample['f']\n    return len(sample)",
        "import os\n    return os.getcwd()",
        "with sample: return 1",
        "try:\n        return sample['a']\n    except KeyError:\n        return 0",
        "return (again := sample)",
        "return waiting(sample)",
        "return foreign(sample)",
        "return decorated(sample)",
        "return Thing(sample)",
        "return thing",
        "return eval(sample)",
        "return getattr(sample, 'wait')()",
        "return globals()",
        "return unknown",
        "metadata[0].name = 'x'",
        "return sum(value for value in huge)",
        "yield sample",
    ],
)
def test_a_hook_that_can_wait_grow_or_call_unknown_code_is_not_nonblocking(body: str) -> None:
    assert not is_nonblocking_source(f"""
import logging, time, functools
import numpy as np
from textwrap import dedent as foreign
import types
labels = ["a"]
form = "%s of %s"
forms = [form]
huge = np.zeros(100_000)
many = list(range(1000))
log = logging.getLogger()
requests_like = types.SimpleNamespace(get=str)
class Thing: pass
thing = Thing()
tools = [thing]
def helper(value): return value
def waiting(value): time.sleep(value)
@functools.lru_cache
def decorated(value): return value
def hook(sample, metadata):
    {body}
""")


def test_a_hook_that_is_not_the_function_in_the_source_is_not_nonblocking() -> None:
    hook, tree = compile_hook("def hook(sample, metadata): return sample")
    _, other = compile_hook("def hook(sample, metadata): return [sample]")

    assert is_nonblocking(hook, tree)
    assert not is_nonblocking(hook, other)
    assert not is_nonblocking(hook.__get__(1), tree)
    assert not is_nonblocking(len, tree)
    assert not is_nonblocking_source(
        "def made():\n    x = 1\n    def hook(sample): return x\n    return hook\nhook = made()"
    )
    assert not is_nonblocking_source("async def hook(sample, metadata): return sample")
    assert not is_nonblocking_source("def hook(sample, kept=print): return sample")


MORE = """
import time
import numpy as np
class Remote:
    def get(self, key, otherwise=None): time.sleep(1)
remote, limit = Remote(), 128
labels = ["a", "b", "c"]
words = {f"word{at}": at for at in range(50_000)}
many = list(words)
tables = [list(words)] * 3
class Price(np.float64):
    def __mul__(self, other): time.sleep(1)
price = Price(1)
def fast(value): return value
if limit:
    def fast(value): time.sleep(1)
def kept(value, all=[]): all.append(value)
def add(to, value): to.append(value)
def put(to, value): to[0] = value
def grow(to, value): to += [value]
def fallen(value): return value
def hook(sample, metadata):
    BODY
"""


@pytest.mark.parametrize(
    "body",
    [
        "return [words.get(word, 0) for word in sample]",
        "return [words[word] if word in words else 0 for word in sample]",
        "return [many[at] for at in sample]",
        "return [labels.index(word) for word in sample]",
        "return sample + [0] * (limit - len(sample))",
        "return [at for at in range(len(sample) - 1)]",
        "return [np for np in sample]",
        "words = [1]\n    words.extend(list(zip(sample, labels)))\n    return ' '.join(word for word in sample)",
        "return any(at > 1 for at, _ in enumerate(reversed(sample))), sum(value for value in sample)",
        "return {'a': fallen(sample), 'b': [fallen for fallen in sample]}",
    ],
)
def test_a_hook_that_looks_up_items_of_large_globals_is_nonblocking(body: str) -> None:
    assert is_nonblocking_source(MORE.replace("BODY", body))


@pytest.mark.parametrize(
    "body",
    [
        "[0 for remote in sample]\n    return remote.get(sample)",
        "[0 for at in sample for remote in at]\n    return remote.get(sample)",
        "return [remote for remote in remote.get(sample)]",
        "return [np.load(sample) for np in np.load(sample)]",
        "return price * sample",
        "return fast(sample)",
        "return kept(sample)",
        "return add(labels, sample)",
        "return put(labels, sample)",
        "return grow(labels, sample)",
        "return [many.index(word) for word in sample]",
        "return [word in many for word in sample]",
        "return [word in tables[0] for word in sample]",
        "return [set(labels) for word in sample]",
        "return [value for value in words]",
        "return many[1:]",
        "return [0 for () in [[]] * 9 for at in range(4096)]",
        "return [0 for sample[remote.get(0)] in sample]",
        "return [0 for sample.name in sample]",
        "return sample + [0] * sample['n']",
        "return sample['n'] * [0]",
        "return range(limit * sample)",
        "sample.extend(value for value in sample)",
        "sample += (value for value in sample)",
        "sample.extend(enumerate(sample))",
        "more = zip(sample)\n    sample.extend(more)",
        "sample.extend(fallen(value for value in sample))",
        "more = [value for value in sample], (value for value in sample)\n    sample.extend(more[1])",
    ],
)
def test_a_hook_that_scans_large_values_keeps_state_or_shadows_names_is_not_nonblocking(body: str) -> None:
    assert not is_nonblocking_source(MORE.replace("BODY", body))


def test_a_hook_that_is_defined_again_under_a_condition_is_not_nonblocking() -> None:
    assert not is_nonblocking_source("""
        import time
        def hook(sample, metadata): return sample
        try:
            def hook(sample, metadata): time.sleep(1)
        except ImportError:
            pass
    """)


def test_a_hook_with_an_exponential_number_of_calls_is_not_nonblocking() -> None:
    calls = "".join(f"def f{at + 1}(value): return f{at}(f{at}(value))\n" for at in range(7))

    assert not is_nonblocking_source(
        f"def f0(value): return value\n{calls}def hook(sample, metadata): return f7(sample)"
    )


@pytest.mark.parametrize(
    ("settings", "small"),
    [
        ({}, True),
        ({"labels": ["a"] * 1000, "scale": 0.5}, True),
        ({"labels": ["a"] * 3000}, False),
        ({"text": "a" * 1_000_000}, False),
        ({"client": object()}, False),
        ({"a": {"b": [[0] * 1000] * 1000}}, False),
    ],
)
def test_settings_are_small_only_if_their_total_content_is_small(settings: Any, small: bool) -> None:
    assert is_small(settings) is small


@pytest.mark.parametrize(
    ("values", "small"),
    [
        ([np.zeros(1024, "f4")], True),
        ([np.zeros(1024, "f4"), np.zeros(1, "f4")], False),
        ({"a": np.zeros(8)}, True),
        ([np.array(["text"] * 64, object)], True),
        ([np.array(["text"] * 65, object)], False),
        ([{"a": 1.0}], False),
        ({"a": 1.0}, False),
        ("text", False),
        ([], True),
    ],
)
def test_only_tensors_of_few_bytes_are_small_tensors(values: Any, small: bool) -> None:
    assert are_small_tensors(values) is small


class RecordedAnswer:
    """A promise that keeps its result or error."""

    def __init__(self) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.answered = asyncio.Event()

    def done(self) -> bool:
        return False

    def set_result(self, result: Any) -> None:
        self.result = result
        self.answered.set()

    def set_exception(self, error: BaseException) -> None:
        self.error = error
        self.answered.set()


def start(hooks: Hooks, sample: Any, nbytes: int = 20) -> RecordedAnswer:
    answer = RecordedAnswer()
    hooks.start(answer, sample, nbytes=nbytes, request_id="")
    return answer


def test_a_request_with_nonblocking_hooks_is_answered_within_one_loop_turn(act: Act) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(PLAIN)

        assert start(hooks, {"x": 2.0}).result == b'"c"'
        assert [each.count for each in stage.model.statistics.snapshot().hook_histograms.values()] == [1, 1]

    act(scene)


@pytest.mark.parametrize(
    ("source", "options", "nbytes"),
    [
        (PLAIN, {}, MAX_SMALL_BYTES + 1),
        (PLAIN, {"replicas": "shared"}, 20),
        (PLAIN, {"metadata": {"words": ["a"] * 5000}}, 20),
        (
            """
    import numpy as np
    np.set_printoptions(precision=2)"""
            + PLAIN,
            {},
            20,
        ),
        (PLAIN.replace('return [sample["x"]]', 'sorted.__doc__; return [sample["x"]]'), {}, 20),
        (PLAIN.replace("def post", "kept = []\n    def keep(x): kept.append(x)\n    def post"), {}, 20),
    ],
    ids=[
        "a large sample",
        "as configured",
        "large metadata",
        "settings of its thread",
        "something unknown",
        "globals are written",
    ],
)
def test_hooks_that_are_not_nonblocking_run_on_a_thread(
    act: Act, source: str, options: dict[str, Any], nbytes: int
) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(source, **options)
        answer = start(hooks, {"x": 1.0}, nbytes)

        assert not answer.answered.is_set()
        await answer.answered.wait()
        assert answer.result == b'"b"'

    act(scene)


def test_nonblocking_hooks_run_on_a_thread_while_many_requests_are_in_flight(act: Act) -> None:
    async def scene(stage: Stage) -> None:
        engine = PuppetEngine()
        hooks = await stage.load(PLAIN, engine)
        under_way = [start(hooks, {"x": 0.0}) for _ in range(replicas.MAX_INLINE_REQUESTS)]
        assert engine.waiting == replicas.MAX_INLINE_REQUESTS

        under_way += [start(hooks, {"x": 1.0}) for _ in range(3 * replicas.MAX_INLINE_REQUESTS)]
        assert engine.waiting < 3 * replicas.MAX_INLINE_REQUESTS
        await engine.gather(4 * replicas.MAX_INLINE_REQUESTS)
        engine.run()
        for each in under_way:
            await each.answered.wait()

        assert [each.result for each in (under_way[0], under_way[-1])] == [b'"a"', b'"b"']

    act(scene)


def test_an_exception_of_a_nonblocking_hook_fails_only_its_own_request(
    act: Act, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(PLAIN)
        bad = start(hooks, {"y": 1.0})

        assert isinstance(bad.error, InferError)
        assert (bad.error.code, bad.error.message) == (Code.INVALID, "pre_inference: KeyError: 'x'")
        assert start(hooks, {"x": 0.0}).result == b'"a"'

    with caplog.at_level(logging.WARNING):
        act(scene)
    assert "pre_inference raised KeyError" in caplog.text


def test_the_thread_runs_and_logs_post_inference_after_its_first_exception(act: Act) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(PLAIN)
        first, second = start(hooks, {"x": 7.0}), start(hooks, {"x": 7.0})

        assert (first.answered.is_set(), second.answered.is_set()) == (True, False)
        await second.answered.wait()
        assert [each.error.code for each in (first, second)] == [Code.INTERNAL] * 2  # type: ignore[union-attr]

    act(scene)


@pytest.mark.parametrize("computes", [True, False], ids=["it computes", "the machine stood still"])
def test_a_slow_hook_stays_nonblocking_only_if_it_did_not_compute(
    act: Act, computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns, cpu_ns = [0], [0]

    class Clock:
        monotonic_ns = staticmethod(lambda: now_ns[0])
        thread_time_ns = staticmethod(lambda: cpu_ns[0])

    def takes_long(*_: Any) -> list[float]:
        now_ns[0] += 2 * replica.SLOW_NS
        cpu_ns[0] += 2 * replica.SLOW_NS if computes else 0
        return [0.0] * 4

    async def scene(stage: Stage) -> None:
        hooks = await stage.load(PLAIN)
        (only,) = hooks.admit()._replicas._live  # type: ignore[union-attr]
        now_ns[0], cpu_ns[0] = time.monotonic_ns(), 1
        only.bound.functions[PRE] = takes_long
        monkeypatch.setattr(replica, "time", Clock)
        begun = [start(hooks, {"x": 0.0}) for _ in range(2)]

        assert [each.answered.is_set() for each in begun] == [True, True]
        assert only.inline_hooks == ({POST} if computes else {PRE, POST})
        hooks.release(None)

    act(scene)
