from __future__ import annotations

import asyncio
import pickle
import sys
import textwrap
import urllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.hooks.loading import POST, PRE, HookModule, check_file, hook_names_in
from penstock.server.hooks.private_modules import FolderOnPath

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_files(hooks: str, **beside: str) -> Path:
        for name, source in beside.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        path = tmp_path / "hooks.py"
        path.write_text(textwrap.dedent(hooks))
        return path

    return write_files


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path: Path) -> Iterator[None]:
    before = (list(sys.meta_path), list(sys.path))
    yield
    files = {name: str(getattr(module, "__file__", None)) for name, module in list(sys.modules.items())}
    remaining = [name for name, file in files.items() if "@" in name or file.startswith(str(tmp_path))]
    assert (remaining, sys.meta_path, sys.path) == ([], *before)


def _pre(module: HookModule, signature: Any = "S", metadata: Any = "M") -> Callable[[Any], Any]:
    hook = module.bind(PRE, signature, metadata)
    assert hook is not None
    return lambda sample: hook(sample, {})


def _refusal(path: Path) -> str:
    with pytest.raises(InferError) as refused:
        HookModule(path)
    assert refused.value.code is Code.INVALID
    return refused.value.message.replace(str(path), "PATH")


class TestHookArguments:
    def test_a_hook_with_three_arguments_gets_sample_signature_and_metadata(self, write: Write) -> None:
        module = HookModule(write("def pre_inference(sample, signature, metadata): return sample, signature, metadata"))

        assert _pre(module)("s") == ("s", "S", "M")
        assert module.bind(POST, "S", "M") is None
        module.close()

    def test_a_hook_with_four_arguments_also_gets_the_request_parameters(self, write: Write) -> None:
        source = """
            def pre_inference(sample, signature, metadata, parameters): return sample, signature, metadata, parameters
            def post_inference(prediction, signature, metadata, parameters): return parameters
        """
        module = HookModule(write(source))
        pre, post = module.bind(PRE, "S", "M"), module.bind(POST, "S", "M")

        assert pre is not None
        assert post is not None
        assert pre("s", {"p": 1}) == ("s", "S", "M", {"p": 1})
        assert post("y", {"p": 1}) == {"p": 1}
        module.close()

    def test_a_hook_with_two_arguments_gets_the_signature_as_metadata(self, write: Write) -> None:
        source = """
            def pre_inference(sample, metadata): return metadata
            def post_inference(prediction, signature, metadata): return metadata
        """
        module = HookModule(write(source))
        post = module.bind(POST, "S", "M")

        assert _pre(module)("s") == "S"
        assert post is not None
        assert post("p", {}) == "M"
        module.close()

    @pytest.mark.parametrize(
        ("function", "found"),
        [
            ("def pre_inference(sample): pass", "(sample)"),
            ("def pre_inference(): pass", "()"),
            ("def pre_inference(sample, meta): pass", "(sample, meta)"),
            ("def pre_inference(metadata, sample): pass", "(metadata, sample)"),
            ("def pre_inference(prediction, metadata): pass", "(prediction, metadata)"),
            ("def pre_inference(sample, signature, metadata=None): pass", "(sample, signature, metadata=None)"),
            ("def pre_inference(sample, signature, *metadata): pass", "(sample, signature, *metadata)"),
            ("def pre_inference(sample, *, metadata): pass", "(sample, *, metadata)"),
            ("async def pre_inference(sample: dict, **metadata: int) -> int: pass", "(sample, **metadata)"),
        ],
    )
    def test_a_hook_with_unexpected_arguments_fails_the_load_and_the_check(
        self, write: Write, function: str, found: str
    ) -> None:
        path = write(f"x = 1\n{function}\n")
        text = "function pre_inference: expected function arguments (sample, signature, metadata) or (sample, metadata)"
        text += " or (sample, signature, metadata, parameters)"

        # inspect leaves the lone * out of its parameters
        assert _refusal(path) == f"hooks file PATH: {text} but found {found.replace('*, ', '')}"
        assert check_file(path) == [f"{path}:2: {text} but found {found}"]

    def test_the_first_argument_of_post_inference_must_be_prediction(self, write: Write) -> None:
        path = write("def post_inference(sample, metadata): pass")

        assert _refusal(path).endswith(
            "(prediction, signature, metadata) or (prediction, metadata) or "
            "(prediction, signature, metadata, parameters) but found (sample, metadata)"
        )

    def test_a_file_without_hooks_fails_the_load_and_the_check(self, write: Write) -> None:
        path = write("def preinference(sample, metadata): pass")

        assert _refusal(path) == "hooks file PATH defines neither pre_inference nor post_inference"
        assert check_file(path) == [f"{path}: hooks file {path} defines neither pre_inference nor post_inference"]

    @pytest.mark.parametrize(
        "source",
        [
            "from elsewhere import pre_inference",
            "from elsewhere import *",
            "import elsewhere as pre_inference",
            "pre_inference = lambda sample, metadata: sample",
            "if True:\n    def pre_inference(sample, metadata): pass",
            "try:\n    pass\nexcept ImportError:\n    def post_inference(prediction, metadata): pass",
            "@anything\ndef pre_inference(*args): pass",
            "def pre_inference(sample, /, metadata): pass",
            "globals()['pre_inference'] = 1",
        ],
    )
    def test_the_check_accepts_hooks_that_only_execution_can_verify(self, write: Write, source: str) -> None:
        assert check_file(write(source)) == []

    def test_hooks_can_be_any_callable_with_the_right_arguments(self, write: Write) -> None:
        source = """
            import functools
            def logged(function):
                @functools.wraps(function)
                def inner(*args): return ["logged", function(*args)]
                return inner
            @logged
            def pre_inference(sample, metadata): return sample
            class Post:
                def __call__(self, prediction, metadata): return prediction
            post_inference = Post()
        """
        module = HookModule(write(source))
        post = module.bind(POST, "S", "M")

        assert _pre(module)("s") == ["logged", "s"]
        assert post is not None
        assert post("p", {}) == "p"
        module.close()

    def test_async_hooks_are_recognized(self, write: Write) -> None:
        module = HookModule(write("async def pre_inference(sample, metadata): return sample"))

        assert module.is_async
        assert asyncio.run(_pre(module)("s")) == "s"
        module.close()

    def test_a_hook_that_is_not_callable_is_rejected(self, write: Write) -> None:
        assert _refusal(write("pre_inference = 3")) == "hooks file PATH: pre_inference is not a function: int"


class TestFailures:
    @pytest.mark.parametrize(
        ("source", "text"),
        [
            ("x = 1\ndef pre_inference(:\n", "hooks file PATH: hooks.py, line 2: invalid syntax"),
            (
                "import no_such_module",
                "hooks file PATH cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'",
            ),
            ("1 / 0", "hooks file PATH cannot be loaded: ZeroDivisionError: division by zero"),
            ("import sys; sys.exit(3)", "hooks file PATH cannot be loaded: SystemExit: 3"),
            ("raise KeyboardInterrupt", "hooks file PATH cannot be loaded: KeyboardInterrupt"),
        ],
    )
    def test_the_reason_a_file_fails_to_load_is_in_the_error(self, write: Write, source: str, text: str) -> None:
        assert _refusal(write(source)) == text

    def test_a_syntax_error_in_a_neighbor_module_is_reported_with_its_file(self, write: Write) -> None:
        path = write("import encoder", encoder="\n\ndef f(:\n")

        assert _refusal(path) == "hooks file PATH: encoder.py, line 3: invalid syntax"

    def test_a_missing_file_is_reported(self, tmp_path: Path) -> None:
        assert _refusal(tmp_path / "none.py") == "hooks file PATH: no such file"
        assert check_file(tmp_path / "none.py") == [f"{tmp_path / 'none.py'}: No such file or directory"]

    def test_the_check_finds_syntax_errors_without_running_the_file(self, write: Write) -> None:
        path = write("raise SystemExit\ndef f(:\n")

        assert check_file(path) == [f"{path}:2: invalid syntax"]


class TestInstances:
    def test_each_instance_has_its_own_globals_and_its_own_neighbor_modules(self, write: Write) -> None:
        source = """
            import memory
            count = 0
            def pre_inference(sample, metadata):
                global count
                count += 1
                memory.seen.append(sample)
                return count, memory.seen
        """
        path = write(source, memory="seen = []")
        one, two = HookModule(path), HookModule(path)

        assert _pre(one)("a") == (1, ["a"])
        assert _pre(one)("b") == (2, ["a", "b"])
        assert _pre(two)("c") == (1, ["c"])
        one.close()
        two.close()

    def test_two_models_can_have_neighbor_modules_of_the_same_name(self, tmp_path: Path) -> None:
        modules = []
        for model in ("one", "two"):
            folder = tmp_path / model
            folder.mkdir()
            (folder / "encoder.py").write_text(f"name = '{model}'")
            (folder / "hooks.py").write_text(
                "from encoder import name\ndef pre_inference(sample, metadata): return name"
            )
            modules.append(HookModule(folder / "hooks.py"))

        assert [_pre(module)("s") for module in modules] == ["one", "two"]
        for module in modules:
            module.close()

    def test_all_forms_of_import_find_neighbor_modules_at_load_and_inside_hooks(
        self, write: Write, tmp_path: Path
    ) -> None:
        (tmp_path / "parts" / "deep").mkdir(parents=True)
        (tmp_path / "parts" / "__init__.py").write_text("import plain\nfrom . import first\n")
        (tmp_path / "parts" / "first.py").write_text("x = 1")
        (tmp_path / "parts" / "deep" / "__init__.py").write_text("")
        (tmp_path / "parts" / "deep" / "last.py").write_text("from ..first import x\nfrom plain import y\n")
        (tmp_path / "bare").mkdir()
        (tmp_path / "bare" / "inner.py").write_text("z = 3")
        source = """
            import parts.deep.last
            import parts.deep.last as last
            from parts import first
            from . import plain
            def pre_inference(sample, metadata):
                import late
                from bare import inner
                import os.path, xml.dom
                return parts.deep.last.x, last.y, first.x, plain.y, late.y, inner.z, os.path.sep, xml.dom.__name__
        """
        module = HookModule(write(source, plain="y = 2", late="from hooks import plain\ny = plain.y * 10"))

        assert _pre(module)("s") == (1, 2, 1, 2, 20, 3, "/", "xml.dom")
        module.close()

    def test_importing_a_neighbor_module_does_not_overwrite_a_global_of_its_name(self, write: Write) -> None:
        source = """
            labels = ["a"]
            def pre_inference(sample, metadata):
                from labels import other
                return labels, other
        """
        module = HookModule(write(source, labels="other = 1"))

        assert _pre(module)("s") == (["a"], 1)
        module.close()

    def test_a_neighbor_module_takes_precedence_over_an_installed_module(self, write: Write) -> None:
        source = """
            import statistics, json
            def pre_inference(sample, metadata): return statistics.mine, json.loads("1")
        """
        module = HookModule(write(source, statistics="mine = True"))

        assert _pre(module)("s") == (True, 1)
        module.close()

    def test_an_edited_file_is_reloaded_and_no_bytecode_is_cached_on_disk(self, write: Write, tmp_path: Path) -> None:
        for value in ("1", "2", "3"):
            source = "import beside\ndef pre_inference(sample, metadata): return beside.x"
            module = HookModule(write(source, beside=f"x = {value}"))

            assert _pre(module)("s") == int(value)
            module.close()
        assert not (tmp_path / "__pycache__").exists()

    def test_libraries_that_look_up_modules_find_the_hook_module(self, write: Write) -> None:
        source = """
            from __future__ import annotations
            import dataclasses, typing
            @dataclasses.dataclass
            class Row:
                x: Item
            class Item: pass
            def pre_inference(sample, metadata):
                return typing.get_type_hints(Row)["x"] is Item
        """
        module = HookModule(write(source))

        assert _pre(module)("s") is True
        module.close()

    def test_importlib_and_pickle_find_neighbor_modules_while_the_folder_is_on_the_path(
        self, write: Write, tmp_path: Path
    ) -> None:
        source = """
            import importlib, pickle
            def pre_inference(sample, metadata):
                return importlib.import_module("shapes_of_mine").Shape, type(pickle.loads(sample)).__name__
        """
        pickled = b"cshapes_of_mine\nShape\n(tR."
        folder = FolderOnPath(tmp_path)
        module = HookModule(write(source, shapes_of_mine="class Shape: pass"))

        assert _pre(module)(pickled)[1] == "Shape"
        assert sys.path[-1] == str(tmp_path)
        module.close()
        folder.close()

    def test_submodules_of_a_standard_package_can_be_used_when_only_the_package_is_imported(
        self, write: Write, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("request", "error"):
            monkeypatch.delitem(sys.modules, f"urllib.{name}", raising=False)
            monkeypatch.delattr(urllib, name, raising=False)
        module = HookModule(write("import urllib\ndef pre_inference(sample, metadata): return getattr(urllib, sample)"))

        assert _pre(module)("request").__name__ == "urllib.request"
        with pytest.raises(AttributeError, match="module 'urllib' has no attribute 'reqest'"):
            _pre(module)("reqest")
        with pytest.raises(AttributeError, match="has no attribute 'a"):
            _pre(module)("a.b")
        module.close()

    def test_a_hook_file_name_need_not_be_an_identifier(self, tmp_path: Path) -> None:
        path = tmp_path / "my-hooks.v2.py"
        path.write_text("def pre_inference(sample, metadata): return __name__")
        module = HookModule(path)

        assert _pre(module)("s").startswith("my-hooks_v2@")
        module.close()


class TestSeveralAnswers:
    YIELDS = "def post_inference(prediction, metadata):\n    yield 1\n"
    WRAPPED = """
        import functools
        def traced(function):
            @functools.wraps(function)
            def call(*given): return function(*given)
            return call
        @traced
        def post_inference(prediction, metadata):
            yield from prediction
    """

    @pytest.mark.parametrize("source", [YIELDS, WRAPPED])
    def test_post_inference_can_yield_when_the_model_is_decoupled(self, write: Write, source: str) -> None:
        path = write(source)
        module = HookModule(path, decoupled=True)
        module.close()

        assert module.yields
        assert check_file(path, decoupled=True) == []

    def test_a_hook_with_an_inner_function_that_yields_is_not_a_generator(self, write: Write) -> None:
        path = write("def post_inference(prediction, metadata):\n    def own(): yield 1\n    return [*own()]")
        module = HookModule(path, decoupled=True)
        module.close()

        assert not module.yields
        assert check_file(path) == []

    OTHERWISE = "model_transaction_policy { decoupled: true } in its config.pbtxt says otherwise"

    @pytest.mark.parametrize(
        ("source", "decoupled", "text"),
        [
            (YIELDS, False, f"post_inference yields, and this model has one answer for each request: {OTHERWISE}"),
            (
                "def pre_inference(sample, metadata):\n    yield 1\n", True,
                "pre_inference must not yield: a sample makes one set of inputs; post_inference may yield",
            ),
            (
                "async def post_inference(prediction, metadata):\n    yield 1\n", True,
                "post_inference yields in an async def; use a plain def",
            ),
        ],
    )  # fmt: skip
    def test_a_hook_that_yields_without_permission_is_rejected(
        self, write: Write, source: str, decoupled: bool, text: str
    ) -> None:
        path = write(source)
        with pytest.raises(InferError) as refused:
            HookModule(path, decoupled=decoupled)

        assert refused.value.message == f"hooks file {path}: {text}"
        assert check_file(path, decoupled=decoupled) == [f"{path}:1: {text}"]


class TestRoots:
    """Modules of a project whose hook file is not beside them."""

    @pytest.fixture
    def project(self, tmp_path: Path) -> Path:
        for name, source in {
            "handlers/keras.py": """
                import json
                from encoder import get_encoder
                from parts import first
                from bare.inner import z
                import only_there, parts.deep.last as last
                encoder = get_encoder()
                def pre_inference(sample, signature, metadata):
                    import late
                    encoder.seen.append(sample)
                    return encoder.seen, first.x, z, only_there.y, last.w, late.y, json.loads("1")
            """,
            "encoder.py": "class Encoder:\n    def __init__(self): self.seen = []\ndef get_encoder(): return Encoder()",
            "late.py": "from only_there import y",
            "parts/__init__.py": "from . import first",
            "parts/first.py": "x = 1",
            "parts/deep/__init__.py": "",
            "parts/deep/last.py": "from ..first import x as w",
            "bare/inner.py": "z = 3",
            "src/only_there.py": "y = 2",
            "src/encoder.py": "1 / 0",
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(textwrap.dedent(source))
        return tmp_path

    def test_each_instance_imports_its_own_modules_from_the_roots_in_order(self, project: Path) -> None:
        path, roots = project / "handlers" / "keras.py", (project, project / "src")
        one, two = (HookModule(path, roots=roots, dialect="cortex") for _ in range(2))

        assert _pre(one)("a") == (["a"], 1, 3, 2, 1, 2, 1)
        assert _pre(one)("b")[0] == ["a", "b"]
        assert _pre(two)("c")[0] == ["c"]
        one.close()
        two.close()

    def test_a_file_can_have_the_name_of_a_module_that_it_imports(self, project: Path) -> None:
        (project / "handlers" / "statistics.py").write_text(
            "import statistics\ndef pre_inference(sample, metadata): return statistics.mean(sample), __name__\n"
        )
        module = HookModule(project / "handlers" / "statistics.py", roots=(project,), dialect="cortex")

        mean, name = _pre(module)([1, 3])
        assert mean == 2
        assert name.startswith("statistics@")
        module.close()

    def test_a_hook_file_in_a_root_can_be_imported_by_its_name(self, project: Path) -> None:
        (project / "handler.py").write_text(
            "import other\ndef pre_inference(sample, metadata): return other.read()\nx = 1"
        )
        (project / "other.py").write_text("def read():\n    import handler\n    return handler.x\n")
        module = HookModule(project / "handler.py", roots=(project,), dialect="cortex")

        assert _pre(module)("s") == 1
        module.close()

    def test_modules_beside_the_file_are_not_found_unless_their_folder_is_a_root(self, project: Path) -> None:
        (project / "handlers" / "beside.py").write_text("")
        (project / "handlers" / "handler.py").write_text("import beside")

        with pytest.raises(InferError, match="No module named 'beside'"):
            HookModule(project / "handlers" / "handler.py", roots=(project,), dialect="cortex")

    def test_all_roots_are_on_the_path_for_pickle(self, project: Path) -> None:
        (project / "src" / "shapes_of_theirs.py").write_text("class Shape: pass")
        folders = FolderOnPath(project, project / "src")

        assert sys.path[-2:] == [str(project), str(project / "src")]
        assert type(pickle.loads(b"cshapes_of_theirs\nShape\n(tR.")).__name__ == "Shape"
        folders.close()


class TestCortex:
    """The arguments that both generations of Cortex accepted, and their errors for all others."""

    PRE = "function pre_inference: expected function arguments arguments (sample, signature, metadata) or"

    def test_each_function_can_have_the_arguments_of_either_cortex_generation(self, write: Write) -> None:
        source = """
            def pre_inference(sample, metadata): return metadata
            def post_inference(prediction, signature, metadata): return metadata
        """
        module = HookModule(write(source), dialect="cortex")
        post = module.bind(POST, "S", "M")

        assert _pre(module)("s") == "S"
        assert post is not None
        assert post("p", {}) == "M"
        module.close()

    def test_a_file_without_hooks_is_accepted(self, write: Write) -> None:
        path = write("x = 1")
        module = HookModule(path, dialect="cortex")

        assert module.bind_all("I", "O", "M") == {PRE: None, POST: None}
        assert check_file(path, dialect="cortex") == []
        module.close()

    @pytest.mark.parametrize(
        ("function", "text"),
        [
            ("def pre_inference(p, metadata): pass", f"{PRE} (sample, metadata) but found (p, metadata)"),
            ("def pre_inference(sample): pass", f"{PRE} (sample, metadata) but found (sample)"),
            (
                "def pre_inference(sample, signature, metadata, parameters): pass",
                f"{PRE} (sample, metadata) but found (sample, signature, metadata, parameters)",
            ),
            (
                "def post_inference(p, signature, metadata): pass",
                (
                    "function post_inference: expected function arguments arguments (prediction, signature, metadata) "
                    "or (prediction, metadata) but found (p, signature, metadata)"
                ),
            ),
            (
                "def pre_inference(sample, metadata=None): pass",
                (
                    "function pre_inference: invalid function signature, can only accept positional arguments: "
                    "(sample, metadata=None)"
                ),
            ),
            (
                "def pre_inference(sample, *metadata): pass",
                (
                    "function pre_inference: invalid function signature, can only accept positional arguments: "
                    "(sample, *metadata)"
                ),
            ),
            (
                "async def pre_inference(sample, metadata): pass",
                "function pre_inference: it is an async def, but must return its value: use a plain def",
            ),
            (
                "def post_inference(prediction, metadata): yield 1",
                "function post_inference: it yields, but must return its value: use a plain def",
            ),
        ],
    )
    def test_unsupported_forms_fail_the_load_and_the_check_with_the_message_of_cortex(
        self, write: Write, function: str, text: str
    ) -> None:
        path = write(f"x = 1\n{function}\n")

        assert self._refusal(path) == f"hooks file PATH: {text}"
        assert check_file(path, dialect="cortex") == [f"{path}:2: {text}"]

    @pytest.mark.parametrize(
        ("source", "text"),
        [
            ("x = 1\ndef f(:\n", "hooks file PATH: hooks.py, line 2: invalid syntax"),
            ("\nimport nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it' (hooks.py, line 2)"),
            ("import broken", "ZeroDivisionError: division by zero (broken.py, line 2)"),
            ("def f():\n    return {}['x']\nf()", "KeyError: 'x' (hooks.py, line 2)"),
            ("pre_inference = 3", "hooks file PATH: function pre_inference: not a function: int"),
        ],
    )
    def test_an_exception_while_loading_a_file_is_reported_with_its_file_and_line(
        self, write: Write, source: str, text: str
    ) -> None:
        assert self._refusal(write(source, broken="\n1 / 0")).endswith(text)

    def test_a_hook_file_can_import_the_logger_of_cortex(self, write: Write, caplog: pytest.LogCaptureFixture) -> None:
        source = """
            from cortex.lib.log import get_logger
            logger = get_logger()
            def pre_inference(sample, metadata): logger.info("got %s", sample)
        """
        one, two = (HookModule(write(source), dialect="cortex") for _ in range(2))
        _pre(one)("s")

        assert [(record.name, record.getMessage()) for record in caplog.records] == [("cortex", "got s")]
        assert "cortex" not in sys.modules
        one.close()
        two.close()

    def test_a_module_named_cortex_in_the_project_takes_precedence(self, write: Write) -> None:
        source = "from cortex import x\ndef pre_inference(sample, metadata): return x"
        module = HookModule(write(source, cortex="x = 1"), dialect="cortex")

        assert _pre(module)("s") == 1
        module.close()

    @staticmethod
    def _refusal(path: Path) -> str:
        with pytest.raises(InferError) as refused:
            HookModule(path, dialect="cortex")
        assert refused.value.code is Code.INVALID
        return refused.value.message.replace(str(path), "PATH")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def preinference(sample, metadata): ...\ndef post_inference(prediction, metadata): ...", [POST]),
        ("if True:\n    async def pre_inference(sample, metadata): ...", [PRE]),
        ("post_inference = lambda prediction, metadata: 1\nfrom other import pre_inference", [PRE, POST]),
        ("from other import *", [PRE, POST]),
        ("def pre_inference(", []),
    ],
    ids=["one is misspelt", "below if", "bound otherwise", "all of another's", "no Python"],
)
def test_hook_names_in_finds_the_hooks_of_a_file_without_running_it(
    write: Write, source: str, found: list[str]
) -> None:
    assert hook_names_in(write(source)) == found


class TestPickles:
    """Functions as pickled by Cortex's Python client."""

    @pytest.fixture
    def dill(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        fake_dill = SimpleNamespace(
            load=lambda file: {"functions": self._functions(), "list": []}[file.read().decode()]
        )
        monkeypatch.setitem(sys.modules, "dill", fake_dill)
        return fake_dill

    @staticmethod
    def _functions() -> dict[str, Any]:
        names: dict[str, Any] = {}
        exec("def pre_inference(sample, signature, metadata): return [sample]\ndef other(): pass", names)
        return {name: names[name] for name in ("pre_inference", "other")}

    @pytest.mark.usefixtures("dill")
    def test_a_pickled_dict_of_functions_is_a_hook_file(self, tmp_path: Path) -> None:
        (tmp_path / "handler.pickle").write_text("functions")
        module = HookModule(tmp_path / "handler.pickle", roots=(tmp_path,), dialect="cortex")

        assert _pre(module)("s") == ["s"]
        assert module.bind(POST, "S", "M") is None
        assert check_file(tmp_path / "handler.pickle", dialect="cortex") == []
        module.close()

    @pytest.mark.usefixtures("dill")
    def test_a_pickle_that_is_not_a_dict_of_functions_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / "handler.pickle").write_text("list")

        assert _refusal(tmp_path / "handler.pickle").endswith("expected a pickled dict of functions, got list")

    def test_the_error_names_the_package_to_install_when_dill_is_missing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "dill", None)
        (tmp_path / "handler.pickle").write_text("functions")

        assert _refusal(tmp_path / "handler.pickle") == (
            "hooks file PATH: a pickle of functions requires dill: pip install dill"
        )
