from __future__ import annotations

import math
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.cortex.project import Project, read_project
from penstock.server.cortex.yaml_mapping import parse_quantity
from penstock.server.yaml_nodes import MAX_NODES, YamlError, YamlNode, parse, resolve

PROJECTS: list[list[dict[str, Any]]] = [
    [
        {"kind": "deployment", "name": "iris"},
        {
            "kind": "api", "name": "a", "endpoint": "/x", "onnx": {"model": "m.onnx", "metadata": {"k": [1, {"z": 2}]}},
            "tracker": {"key": "k", "model_type": "regression"}, "compute": {"min_replicas": 1, "cpu": "1"},
        },
        {"kind": "api", "name": "b", "tensorflow": {"model": "s3://b/k", "signature_key": "p", "python_path": "lib"}},
    ],
    [
        {"kind": "deployment", "name": "old"},
        {"kind": "api", "name": "c", "model": "m.zip", "model_format": "tensorflow", "request_handler": "h.py"},
    ],
]  # fmt: skip
ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["api", "deployment", "onnx"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("project")


def read(folder: Path, text: str) -> Project:
    (folder / "cortex.yaml").write_bytes(text.encode("utf-8", "replace"))
    return read_project(folder)


def check(project: Project, text: str) -> None:
    """Check what must hold for any text: each finding has an existing line, and each API has what it needs."""
    lines = max(1, len(text.splitlines()) + 1)
    for finding in project.findings:
        assert finding.path == project.file
        assert 0 <= finding.line <= lines
        assert finding.message
        assert str(finding).startswith(f"{project.file}:" if finding.line else str(project.file))
    for api in project.apis:
        assert api.name
        assert api.model
        assert api.kind in {"onnx", "tensorflow"}
        assert api.endpoint.startswith("/")
        assert isinstance(api.metadata, dict)
        assert project.mistakes or 1 <= api.compute["min_replicas"] <= api.compute["max_replicas"]


class TestFuzzedText:
    @pytest.mark.slow
    @given(text=st.text())
    def test_any_text_is_read_or_reported(self, text: str, folder: Path) -> None:
        project = read(folder, text)

        check(project, text)
        assert project.mistakes or project.deployment

    @given(
        text=st.lists(
            st.sampled_from(
                ["- ", "  ", "\n", ": ", "kind", "api", "deployment", "name", "onnx", "model", "a", "{", "}", "[", "]",
                 ",", "&a", "*a", "<<", "!!str", "!x", "'", '"', "|", ">", "#", "%YAML 9", "---", "...", "\t", "? "]
            ),
            max_size=30,
        ).map("".join)
    )  # fmt: skip
    def test_text_of_random_yaml_tokens_is_read_or_reported(self, text: str, folder: Path) -> None:
        check(read(folder, text), text)

    @pytest.mark.slow
    @given(value=ODD)
    def test_any_valid_yaml_document_is_read_or_reported(self, value: Any, folder: Path) -> None:
        text = yaml.safe_dump(value, allow_unicode=True)

        check(read(folder, text), text)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bool]:
    """Give a project as text in which one item may be changed, and whether it is."""
    project = draw(st.sampled_from(PROJECTS))
    path, here = list[Any](), project
    while isinstance(here, (dict, list)) and here and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here))))
        path.append(key)
        here = here[key]
    change = draw(st.sampled_from(["nothing", "remove", "replace", "rename"])) if path else "nothing"
    text = yaml.safe_dump(_changed(project, path, change, draw), sort_keys=False)
    return text, change != "nothing"


def _changed(value: Any, path: list[Any], change: str, draw: st.DrawFn) -> Any:
    if not path or change == "nothing":
        return value
    key, copy = path[0], dict(value) if isinstance(value, dict) else list(value)
    if len(path) > 1:
        copy[key] = _changed(copy[key], path[1:], change, draw)
    elif change == "remove":
        del copy[key]
    elif change == "rename" and isinstance(copy, dict):
        copy = {name + "x" if name == key else name: each for name, each in copy.items()}
    else:
        copy[key] = draw(ODD)
    return copy


class TestMutatedProject:
    @pytest.mark.slow
    @given(case=mutated())
    def test_a_mutated_project_is_read_or_reported_with_a_line(self, case: tuple[str, bool], folder: Path) -> None:
        text, changed = case
        project = read(folder, text)

        check(project, text)
        assert all(finding.line for finding in project.findings)
        if not changed:
            assert project.findings == ()
            assert len(project.apis) == text.count("kind: api")

    @pytest.mark.parametrize("project", PROJECTS)
    def test_an_unknown_key_is_reported_with_its_line(self, project: list[dict[str, Any]], folder: Path) -> None:
        for number in range(len(project)):
            changed = [dict(resource) for resource in project]
            changed[number]["nonsense"] = 1
            text = yaml.safe_dump(changed, sort_keys=False)

            (finding,) = read(folder, text).findings

            assert text.splitlines()[finding.line - 1] == "  nonsense: 1"


class TestScalars:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("", None), ("~", None), ("null", None), ("yes", True), ("n", False), ("ON", True), ("1e-3", 0.001),
            ("5", 5), ("-5", -5), ("+5", 5), ("017", 15), ("0o17", 15), ("0x1F", 31), ("0b11", 3), ("1_000", 1000),
            (".5", 0.5), ("5.", 5.0), (".inf", math.inf), ("-.inf", -math.inf), ("12:30", "12:30"), ("089", 89.0),
            ("2019-01-02", "2019-01-02"), ("1.2.3", "1.2.3"), ("-", "-"), ("_", "_"), ("99999999999999999999", 1e20),
        ],
    )  # fmt: skip
    def test_scalars_are_resolved_as_cortex_resolved_them(self, text: str, value: object) -> None:
        assert resolve(text) == value
        assert type(resolve(text)) is type(value)

    @pytest.mark.slow
    @given(text=st.text() | st.from_regex(r"[-+]?[0-9._eExXbo]{1,20}"))
    def test_any_scalar_is_resolved_to_a_plain_value(self, text: str) -> None:
        value = resolve(text)

        assert value is None or isinstance(value, str | int | float)
        assert not isinstance(value, str) or value == text

    @given(number=st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False))
    def test_a_number_written_by_repr_is_read_back(self, number: float) -> None:
        assert resolve(repr(number)) == number


class TestNodes:
    def plain_values(self, text: str) -> Any:
        return parse(text).unwrapped

    def test_quotes_and_tags_decide_the_type_of_a_scalar(self) -> None:
        text = """{a: '5', b: !!str 5, c: !!float 5, d: !other x, e: "yes", f: |\n  5\n}"""

        assert self.plain_values(text.replace(", f: |\n  5\n", "")) == {
            "a": "5",
            "b": "5",
            "c": 5.0,
            "d": "x",
            "e": "yes",
        }

    def test_nodes_have_the_lines_where_their_key_and_value_begin(self) -> None:
        root = parse("a:\n  b:\n  - 1\n")

        assert isinstance(root.value, dict)
        inner = root.value["a"]
        assert (root.line, inner.key_line, inner.line) == (1, 1, 2)

    def test_explicit_keys_override_merged_keys(self) -> None:
        assert self.plain_values("a: &a {x: 1, y: 1}\nb: &b {x: 2, z: 2}\nc: {<<: [*a, *b], y: 3}\n")["c"] == {
            "x": 1, "y": 3, "z": 2,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a: &a [*a]", "an alias refers to a value that contains it"),
            ("a: {<<: 5}", "map merge requires map or sequence of maps as the value"),
            ("- " * 5000, "nested too deeply"),
            ('"\\UFFFFFFFF"', "invalid yaml: "),
            ("\x00", "the character '\\x00' is not allowed"),
            ("a: 1\n---\nb: 2\n", "expected a single document in the stream, but found another document"),
            ("{[1]: 2}", "non string key found: a list or a map"),
        ],
    )
    def test_a_document_that_is_not_a_tree_of_plain_maps_is_rejected(self, text: str, message: str) -> None:
        with pytest.raises(YamlError) as caught:
            parse(text)

        assert message in str(caught.value)

    def test_aliases_that_expand_to_too_many_values_are_rejected(self) -> None:
        lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]"]
        lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 12)]

        with pytest.raises(YamlError, match=f"more than {MAX_NODES} values"):
            parse("\n".join(lines))

    def test_an_empty_document_is_null(self) -> None:
        assert parse("") == YamlNode(None, 1)


class TestQuantities:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1", "1"), ("200m", "0.2"), ("0.5", "0.5"), (".5", "0.5"), ("1.", "1"), ("1k", "1000"), ("2Ki", "2048"),
            ("1.5Gi", str(3 << 29)), ("1e3", "1000"), ("1E-3", "0.001"), ("1E", "1e18"), ("3u", "0.000003"),
            ("-1", "-1"),
        ],
    )  # fmt: skip
    def test_quantities_are_parsed_as_kubernetes_parses_them(self, text: str, value: str) -> None:
        assert parse_quantity(text) == Decimal(value)

    @pytest.mark.slow
    @given(text=st.text() | st.from_regex(r"[0-9.]{0,5}[eEinumkKMGTP]{0,3}[-+]?[0-9]{0,5}"))
    def test_any_text_is_a_finite_quantity_or_rejected(self, text: str) -> None:
        with suppress(ValueError):
            assert parse_quantity(text).is_finite()
