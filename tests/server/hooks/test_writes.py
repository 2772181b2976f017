from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.hooks.writes import GlobalWrite, find_global_writes, parse_source, writes_in


def _names(source: str) -> list[str]:
    return [write.name for write in writes_in(parse_source(textwrap.dedent(source)))]


@pytest.mark.parametrize(
    "body",
    [
        "global counter",
        "state['x'] = 1",
        "state.x = 1",
        "state['x'] += 1",
        "state.a.b[0].c = 1",
        "del state['x']",
        "for state['x'] in sample: pass",
        "for state.x, y in sample: pass",
        "with open('f') as state.file: pass",
        "a, (state['x'], *state.rest) = sample",
        "state['x']: int = 1",
        "[0 for state['x'] in sample]",
        "state.setdefault('x', []).append(1)",
        "get_state().x = 1",
        "state.append(1)",
        "state.rows.update(a=1)",
        "setattr(state, 'x', 1)",
        "globals()['x'] = 1",
        "np.add(a, b, out=state)",
        "np.copyto(state[0], a)",
        "np.random.shuffle(state)",
        "local = state; local['x'] = 1",
        "local = other = state.rows[0]; other += 1",
        "local, other = sample, state; other.x = 1",
        "local: dict = state; local['x'] = 1",
        "(local := state).clear()",
        "if (local := state): local.clear()",
        "for row in state: row.x = 1",
        "for key, row in state.items(): row['x'] = 1",
        "with state as local: local.x = 1",
        "local = state if sample else []; local.append(1)",
        "local = sample or state; local.append(1)",
        "[row.update(x=1) for row in state]",
        "match sample:\n        case [*rows]: state['x'] = rows",
        "pre_inference.last = sample",
        "(lambda: state.append(1))()",
        "x = lambda key: state.pop(key)",
        "class Local:\n        state.x = 1",
        "class Local:\n        def method(self): state.x = 1",
        "def inner():\n        nonlocal sample\n        state['x'] = sample",
        "async def inner():\n        state['x'] = await sample",
        "metadata['seen'] = 1",
        "signature.append(1)",
        "a = b = state; a = b; b.x = 1",
    ],
)
def test_a_write_to_a_global_in_a_hook_is_found(body: str) -> None:
    source = f"import numpy as np\nstate = {{}}\ndef pre_inference(sample, signature, metadata):\n    {body}\n"

    assert writes_in(parse_source(source)) != []


@pytest.mark.parametrize(
    "body",
    [
        "return state['x']",
        "x = state.x",
        "state = {}; state['x'] = 1",
        "for state in sample: state.x = 1",
        "state, y = sample; state.x = y",
        "import state; del state",
        "sample['x'] = 1; sample.append(2)",
        "rows = [state[x] for x in sample]; rows.append(1)",
        "out = np.zeros(3); out[0] = 1; out += 1",
        "np.append(sample, 1); np.add(sample, 1, out=sample); np.random.seed(0)",
        "copy = dict(state); copy['x'] = 1",
        "copy = state.copy(); copy.update(x=1)",
        "text = 'a'; text += 'b'",
        "[state for state in sample][0].x = 1",
        "f = lambda state: state.update(x=1)",
        "with open('f') as state: state.x = 1",
        "try: pass\n    except ValueError as state: state.x = 1",
        "match sample:\n        case {'a': x, **state}: state['x'] = x",
        "x = 0\n    def inner():\n        nonlocal x\n        x = 1",
        "class Local:\n        x = 1\n        x += 1",
        "class Local:\n        def method(self): self.x = 1",
        "encoder.transform(sample); logger.info('x')",
        "result = {}\n    for key in state: result[key] = state[key]",
        "a = b = sample; a = b; b = a; b.x = 1",
    ],
)
def test_no_write_is_found_in_a_hook_that_changes_only_local_values(body: str) -> None:
    source = f"import numpy as np\nstate = {{}}\ndef pre_inference(sample, signature, metadata):\n    {body}\n"

    assert writes_in(parse_source(source)) == []


def test_assignments_at_load_time_are_not_global_writes() -> None:
    source = """
        labels = []
        labels.append("a")
        labels[0] = "b"
        for labels[0] in ["c"]:
            pass
        [labels.append(x) for x in "de"]
        class Encoder:
            table = {}
            table["a"] = 1
        Encoder.size = 3
        def pre_inference(sample, metadata):
            return labels
    """

    assert _names(source) == []


def test_methods_that_write_their_instance_are_found_except_constructors() -> None:
    source = """
        class Scaler:
            def __init__(self):
                self.mean = 0
            def fit(self, x):
                self.mean = x
            def note(self, x):
                self.seen.append(x)
            @staticmethod
            def double(x):
                x["a"] = 2
            @classmethod
            def name(cls, x):
                cls.title = x
    """

    assert writes_in(parse_source(textwrap.dedent(source))) == [
        GlobalWrite("Scaler", 6), GlobalWrite("Scaler", 8), GlobalWrite("Scaler", 14),
    ]  # fmt: skip


def test_a_write_to_the_first_parameter_of_a_hook_is_not_a_global_write() -> None:
    assert _names("def pre_inference(metadata, sample):\n    metadata['x'] = 1") == []


def test_global_writes_are_reported_with_name_and_line_in_order() -> None:
    source = "import state\nn = 0\ndef f():\n    global n\n    n += 1\n    state.current = n\n"

    assert writes_in(parse_source(source)) == [GlobalWrite("n", 4), GlobalWrite("state", 6)]


def test_a_comprehension_has_its_own_names_but_not_its_first_iterable() -> None:
    source = "table = {}\ndef f(x):\n    [table.update(a=1) for table in x]\n    [y for y in table.pop('a')]\n"

    assert writes_in(parse_source(source)) == [GlobalWrite("table", 4)]


def test_names_in_a_class_body_are_not_in_scope_in_its_methods() -> None:
    source = "box = {}\nclass A:\n    box = {}\n    def f(self):\n        box['a'] = 1\n"

    assert writes_in(parse_source(source)) == [GlobalWrite("box", 5)]


def test_writes_in_modules_imported_from_beside_the_hooks_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("def pre_inference(sample, metadata):\n    from memory import remember\n")
    (tmp_path / "memory.py").write_text("import parts.last\nfrom parts import first\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from . import first\n")
    (tmp_path / "parts" / "first.py").write_text("from ..memory import x\ndef f():\n    global a\n")
    (tmp_path / "parts" / "last.py").write_text("def f():\n    global b\n")
    (tmp_path / "unused.py").write_text("def f():\n    global c\n")
    (tmp_path / "broken.py").write_text("def f(:\n")

    found = find_global_writes(tmp_path / "hooks.py")

    assert sorted(map(str, found)) == ["a (first.py:3)", "b (last.py:2)"]


def test_a_module_beside_the_hooks_file_with_a_syntax_error_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("import broken\n")
    (tmp_path / "broken.py").write_text("def f(:\n")

    assert find_global_writes(tmp_path / "hooks.py") == []


def test_the_iris_example_of_the_seeds_has_no_global_writes() -> None:
    source = """
        import numpy as np
        labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]
        def pre_inference(sample, signature, metadata):
            return {signature[0].name: [sample["sepal_length"], sample["sepal_width"]]}
        def post_inference(prediction, signature, metadata):
            predicted_class_id = prediction[0][0]
            return labels[predicted_class_id]
    """

    assert _names(source) == []


_STATEMENTS = st.sampled_from(
    ["global a", "a = b", "a.x = b", "a[b] = c", "for a in b: c.x = a", "del a", "b.append(a)", "lambda a: a.pop()",
     "[a for a in b]", "c = [b := 1 for a in c]", "class a:\n        b = c", "def b(a): a.x = 1", "a += b", "pass"]
)  # fmt: skip


@given(st.lists(_STATEMENTS, min_size=1, max_size=6))
def test_every_valid_function_is_analyzed_without_an_exception(statements: list[str]) -> None:
    source = "a = b = c = {}\ndef f():\n" + "".join(f"    {statement}\n" for statement in statements)
    try:
        compile(source, "hooks.py", "exec")
    except SyntaxError:
        return

    found = writes_in(parse_source(source))

    assert ("global a" in statements) <= any(write.name == "a" for write in found)
