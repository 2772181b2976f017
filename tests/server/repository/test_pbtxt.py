from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.protobuf import model_config_pb2
from penstock.server.repository.findings import MistakeError
from penstock.server.repository.pbtxt import field_lines, parse


def test_parsing_returns_the_line_of_each_field(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(
        "# a comment with { and name: 'x'\n"
        'name: "a # b"\n'
        "input [\n"
        '  { name: "x" data_type: TYPE_FP32\n'
        "    dims: [ 4 ] },\n"
        '  { name: "y"\n'
        "    reshape { shape: [] } }\n"
        "]\n"
        "dynamic_batching <\n"
        "  default_queue_policy { max_queue_size: 3 }\n"
        ">\n"
    )
    config, lines = parse(path)

    assert [tensor.name for tensor in config.input] == ["x", "y"]
    assert lines["name"] == 2
    assert lines["input.dims"] == 5
    assert lines["input.reshape"] == 7
    assert lines["dynamic_batching.default_queue_policy.max_queue_size"] == 10


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b'\xef\xbb\xbfname: "m"\r\nmax_batch_size: 8\r\n')
    config, lines = parse(path)

    assert (config.name, config.max_batch_size) == ("m", 8)
    assert lines == {"name": 1, "name=m": 1, "max_batch_size": 2}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("\nmax_batch_sise: 3", 2, 'no field named "max_batch_sise"'),
        ("\n\ninput { data_type: TYPE_FOO }", 3, "no value named TYPE_FOO"),
        ('\ninput { data_type: "TYPE_FP32" }', 2, 'named "TYPE_FP32": enum values must not be quoted'),
        ("instance_group { kind: 'KIND_CPU' }", 1, "enum values must not be quoted"),
        ('max_batch_size: "x"', 1, "Couldn't parse integer"),
        ('name: "a"\nname: "b"', 2, "multiple"),
        ("input {", 1, "Expected"),
    ],
)
def test_a_parse_error_has_its_file_and_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(text)
    with pytest.raises(MistakeError) as caught:
        parse(path)

    assert caught.value.finding.path == path
    assert caught.value.finding.line == line
    assert words in caught.value.finding.message


def test_an_empty_map_in_json_style_adds_no_entry(tmp_path: Path) -> None:
    """Triton's answers have them; protobuf's text format would read each as an entry without a name."""
    path = tmp_path / "config.pbtxt"
    accelerator = 'optimization { execution_accelerators { gpu_execution_accelerator { name: "x" parameters: {} } } }'
    empty = "parameters: {}\nmetric_tags: {}\ncc_model_filenames: {}"
    path.write_text(f'{empty}\nmetric_tags {{ value: "x" }}\n{accelerator}')
    config, _ = parse(path)

    assert not config.parameters
    assert dict(config.metric_tags) == {"": "x"}
    assert not config.cc_model_filenames
    assert not config.optimization.execution_accelerators.gpu_execution_accelerator[0].parameters


def test_a_comment_may_be_in_any_encoding(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes('name: "m" # 模型 "{\n# пример\nmax_batch_size: 8\n'.encode("gbk"))
    config, lines = parse(path)

    assert (config.name, config.max_batch_size) == ("m", 8)
    assert lines["max_batch_size"] == 3


def test_text_outside_comments_that_is_not_utf8_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes('# 模型\nname: "m"\ninput { name: "图像" }\n'.encode("gbk"))
    with pytest.raises(MistakeError) as caught:
        parse(path)

    assert str(caught.value) == f"{path}:3: is not UTF-8: only comments may use another encoding"


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_an_unreadable_config_pbtxt_is_a_mistake(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "config.pbtxt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MistakeError):
        parse(path)


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("abn:{}[]<>#\"'\\\n 1,"), max_size=60))
def test_field_lines_are_within_the_text_for_any_text(text: str) -> None:
    assert all(1 <= line <= text.count("\n") + 1 for line in field_lines(text).values())


def test_a_later_import_of_tritonclient_uses_the_same_messages() -> None:
    program = (
        "import sys, types\n"
        "from penstock.server.protobuf import model_config_pb2\n"
        "mine = model_config_pb2()\n"
        "assert 'grpc' not in sys.modules and 'tritonclient.grpc' not in sys.modules\n"
        "package = types.ModuleType('tritonclient.grpc')\n"  # the real one needs grpcio
        "import tritonclient\n"
        "package.__path__ = [tritonclient.__path__[0] + '/grpc']\n"
        "sys.modules['tritonclient.grpc'] = package\n"
        "from tritonclient.grpc import model_config_pb2 as theirs, service_pb2\n"
        "assert theirs is mine\n"
        "service_pb2.ModelConfigResponse(config=mine.ModelConfig(name='m'))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_model_config_pb2_is_loaded_once() -> None:
    assert model_config_pb2() is model_config_pb2()
