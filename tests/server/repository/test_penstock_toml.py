from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.spec import InstanceGroup, PaddedAxis
from penstock.server.repository.findings import Finding, MistakeError
from penstock.server.repository.parsed_config import ParsedConfig
from penstock.server.repository.penstock_toml import KEYS, PADDING, PROVIDERS, key_lines, read_toml
from penstock.server.repository.placing import ANY_DEVICE

NO_SIZE = 'runtime.gpu_memory must be a number of bytes above 0, or a size such as "4 GiB"'
NO_SIZE += ' or "500 MB", not "4 gib" (string)'
DOCS = Path(__file__).parents[3] / "docs" / "repository.md"


def read(folder: Path, text: str) -> tuple[ParsedConfig, list[Finding]]:
    path = folder / "penstock.toml"
    path.write_text(text, encoding="utf-8")
    return read_toml(path)


def test_all_keys_of_penstock_toml_are_read(tmp_path: Path) -> None:
    (tmp_path / "handler.py").touch()
    (tmp_path / "requirements.txt").touch()
    stated, findings = read(
        tmp_path,
        """
[model]
backend = "onnxruntime"
file = "net.onnx"
versions = { latest = 2 }
[batching]
max_batch_size = 32
cap = 16
preferred = [8, 4]
max_queue_delay_us = 100
executor = "loop"
max_queue_rows = 10
max_queue_bytes = 1000
max_queue_requests = 5
default_timeout_us = 7
allow_timeout_override = false
latency_target_ms = 12.5
allowed_sizes = [8, 1, 4]
split = true
invariance = "strict"
run_limit_ms = 3000
[instances]
count = 2
devices = ["cuda:0", "cuda:1"]
[hooks]
file = "handler.py"
replicas = "shared"
timeout_s = 3
workers = 2
interpreter = "/usr/bin/python3"
requirements = "requirements.txt"
worker_memory_mb = 512
[hooks.metadata]
any = { thing = [1, "two"] }
[runtime]
intra_op_threads = 2
inter_op_threads = 1
execution_mode = "parallel"
mem_arena = false
mem_pattern = true
graph_level = "basic"
cpu_fallback = true
gpu_graphs = "auto"
gpu_memory = "1.5 GiB"
pinned = false
[runtime.cuda]
use_tf32 = false
gpu_mem_limit = 4096
[runtime.tensorrt]
trt_profile_min_shapes = "x:1x3x8x8"
""",
    )

    assert findings == []
    assert stated.values == {
        "model.backend": "onnxruntime",
        "model.file": "net.onnx",
        "model.versions": ("latest", 2),
        "batching.max_batch_size": 32,
        "batching.cap": 16,
        "batching.preferred": (4, 8),
        "batching.max_queue_delay_us": 100,
        "batching.executor": "loop",
        "batching.max_queue_rows": 10,
        "batching.max_queue_bytes": 1000,
        "batching.max_queue_requests": 5,
        "batching.default_timeout_us": 7,
        "batching.allow_timeout_override": False,
        "batching.latency_target_ms": 12_500,
        "batching.allowed_sizes": (1, 4, 8),
        "batching.split": True,
        "batching.invariance": True,
        "batching.run_limit_ms": 3_000_000,
        "instances": (InstanceGroup(2, ("cuda:0",)), InstanceGroup(2, ("cuda:1",))),
        "instances.devices_configured": True,
        "hooks.file": (tmp_path / "handler.py").resolve(),
        "hooks.replicas": "shared",
        "hooks.timeout_s": 3.0,
        "hooks.workers": 2,
        "hooks.interpreter": "/usr/bin/python3",
        "hooks.requirements": tmp_path / "requirements.txt",
        "hooks.worker_memory_mb": 512 << 20,
        "hooks.metadata": {"any": {"thing": [1, "two"]}},
        "runtime.intra_op_threads": "2",
        "runtime.inter_op_threads": "1",
        "runtime.execution_mode": "1",
        "runtime.mem_arena": "0",
        "runtime.mem_pattern": "1",
        "runtime.graph_level": "basic",
        "runtime.cpu_fallback": "1",
        "runtime.gpu_graphs": "auto",
        "runtime.gpu_memory": 3 << 29,
        "runtime.pinned": "0",
        "runtime.cuda": True,
        "runtime.cuda.use_tf32": "0",
        "runtime.cuda.gpu_mem_limit": "4096",
        "runtime.tensorrt": True,
        "runtime.tensorrt.trt_profile_min_shapes": "x:1x3x8x8",
    }


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[hooks]\nmemory_mb = 1", 2, "unknown key hooks.memory_mb, the nearest known is hooks.worker_memory_mb"),
        (
            "[runtime.cuda]\nuse_tf23 = true",
            2,
            "unknown key runtime.cuda.use_tf23, the nearest known is runtime.cuda.use_tf32",
        ),
        (
            "[runtime]\ntensorrt = { trt_fp16 = true }",
            2,
            "unknown key runtime.tensorrt.trt_fp16, the nearest known is runtime.tensorrt.trt_fp16_enable",
        ),
        (
            "[runtime.cuda]\nprefer_nhwc = 2",
            2,
            "runtime.cuda.prefer_nhwc must be true or false, not 2 (integer)",
        ),
        ("[runtime]\ncuda = true", 2, "runtime.cuda must be a table, [runtime.cuda], not true (boolean)"),
        (
            '[runtime]\ngpu_memory = "4 gib"',
            2,
            NO_SIZE,
        ),
        ("[runtime]\ngpu_graphs = 1", 2, 'runtime.gpu_graphs must be true, false or "auto", not 1 (integer)'),
        ("[batchin]\ncap = 1", 1, "unknown table batchin, the nearest known is batching"),
        (
            "\n[batching]\nmax_batchsize = 1",
            3,
            "unknown key batching.max_batchsize, the nearest known is batching.max_batch_size",
        ),
        ("[batching]\ntimeout_s = 1", 2, "unknown key batching.timeout_s, the nearest known is hooks.timeout_s"),
        (
            "[instances]\nqqqqqq = 1",
            2,
            "unknown key instances.qqqqqq, known here: count, devices, memory_budget_mb",
        ),
        ("[batching]\ncap = true", 2, "batching.cap must be an integer of at least 1, not true (boolean)"),
        ("[batching]\ncap = 0", 2, "batching.cap must be an integer of at least 1, not 0 (integer)"),
        ('[batching]\ncap = "8"', 2, 'batching.cap must be an integer of at least 1, not "8" (string)'),
        (
            '[batching]\nexecutor = "fast"',
            2,
            'batching.executor must be one of "auto", "thread", "loop", not "fast" (string)',
        ),
        ("batching = 3", 1, "batching must be a table, [batching], not 3 (integer)"),
        (
            '[instances]\ndevices = ["gpu"]',
            2,
            'instances.devices must be a list of devices ("cpu", "cuda:0", ...), not [\'gpu\'] (list)',
        ),
        (
            '[model]\nfile = "../x"',
            2,
            'model.file must be the name of a file in the version\'s folder, not "../x" (string)',
        ),
        ('[hooks]\nfile = "gone.py"', 2, "hooks.file: 'gone.py' does not exist"),
        ('[hooks]\nfile = "../handler.py"', 2, "hooks.file: '../handler.py' is outside the model's folder"),
        ('[hooks]\nfile = "/etc/passwd"', 2, "hooks.file: '/etc/passwd' is outside the model's folder"),
        ("[hooks]\nreplicas = 2", 1, "[hooks] must set file"),
        ("[hooks]\nworkers = -1", 2, "hooks.workers must be an integer from 0 to 256, not -1 (integer)"),
        (
            '[hooks]\nfile = "penstock.toml"\nworkers = 0\ninterpreter = "p"',
            4,
            "hooks.interpreter requires hooks.workers of at least 1",
        ),
        (
            '[hooks]\nfile = "penstock.toml"\nreplicas = 3\nworkers = 2',
            3,
            "hooks.replicas is 3, but each of the 2 hooks.workers is a replica: remove one of the two",
        ),
        (
            '[hooks]\nfile = "penstock.toml"\nworkers = 2\nrequirements = "gone.txt"',
            4,
            "hooks.requirements: 'gone.txt' does not exist",
        ),
        (
            "[batching]\nlatency_target_us = 5",
            2,
            "unknown key batching.latency_target_us, the nearest known is batching.latency_target_ms",
        ),
        (
            "[batching]\nlatency_target_ms = 0",
            2,
            "batching.latency_target_ms must be a number of milliseconds above 0, at most 86400000, not 0 (integer)",
        ),
        (
            '[batching]\ninvariance = "on"',
            2,
            'batching.invariance must be one of "off", "strict", not "on" (string)',
        ),
        (
            "[instances]\ncount = 0",
            2,
            'instances.count must be an integer from 1 to 1024, or "auto", not 0 (integer)',
        ),
        (
            "[instances]\nmemory_budget_mb = 100",
            2,
            'instances.memory_budget_mb requires instances.count = "auto"',
        ),
        ("[paddin]\naxis = 0", 1, "unknown table paddin, the nearest known is padding.<input>"),
        ("[padding]\naxis = 0", 2, "padding.axis must be a table per input, [padding.<input>], not 0 (integer)"),
        ("padding = 3", 1, "padding must be a table per input, [padding.<input>], not 3 (integer)"),
        ("\n[padding.ids]", 2, "[padding.ids] must set axis"),
        (
            "[padding.ids]\naxis = 0\nbucket = [16]",
            3,
            "unknown key padding.ids.bucket, the nearest known is padding.<input>.buckets",
        ),
        (
            "[padding.ids]\naxis = 0\ncap = 1",
            3,
            "unknown key padding.ids.cap, the nearest known is batching.cap",
        ),
        (
            "[padding.ids]\nbuckets = [32, 16]\naxis = 0",
            2,
            "padding.ids.buckets must be a list of integers above 0, each above the one before, not [32, 16] (list)",
        ),
        (
            '[padding."input:0"]\naxis = -1',
            2,
            "padding.input:0.axis must be an integer of at least 0, not -1 (integer)",
        ),
        (
            '[padding.ids]\naxis = 0\n[padding.ids.outputs]\ny = "0"',
            3,
            "padding.ids.outputs must be a table of outputs, each with its axis: { name = 0 }, not {'y': '0'} (table)",
        ),
        (
            "[padding]\nids = { axis = 0, valu = 1 }",
            2,
            "unknown key padding.ids.valu, the nearest known is padding.<input>.value",
        ),
    ],
)
def test_a_mistake_has_its_line_and_a_correction(tmp_path: Path, text: str, line: int, message: str) -> None:
    _, findings = read(tmp_path, text)

    assert [(finding.line, finding.message) for finding in findings] == [(line, message)]


def test_padding_tables_are_read(tmp_path: Path) -> None:
    stated, findings = read(
        tmp_path,
        """
[padding.input_ids]
axis = 0
buckets = [16, 128]
value = -1
mask = "attention_mask"
outputs = { last_hidden_state = 0 }
[padding."serving_default.image:0"]
axis = 2
[padding.tokens.outputs]
logits = 1
[padding.tokens]
axis = 1
""",
    )

    assert findings == []
    assert stated.values == {
        "padding": (
            PaddedAxis("input_ids", 0, (16, 128), -1.0, "attention_mask", {"last_hidden_state": 0}),
            PaddedAxis("serving_default.image:0", 2),
            PaddedAxis("tokens", 1, outputs={"logits": 1}),
        )
    }


def test_an_automatic_instance_count_is_read(tmp_path: Path) -> None:
    stated, findings = read(tmp_path, '[instances]\ncount = "auto"\nmemory_budget_mb = 3')

    assert findings == []
    assert stated.values == {"instances": (InstanceGroup(0, (ANY_DEVICE,)),), "instances.memory_budget_mb": 3 << 20}


def test_all_mistakes_of_a_file_are_reported_together(tmp_path: Path) -> None:
    _, findings = read(tmp_path, "[batching]\ncap = 0\nexecutor = 1\n[zzz]\n")

    assert [finding.line for finding in findings] == [2, 3, 4]


def test_a_hook_file_that_links_out_of_the_folder_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "outside.py").touch()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "handler.py").symlink_to(tmp_path / "outside.py")
    _, findings = read(folder, '[hooks]\nfile = "handler.py"')

    assert [finding.message for finding in findings] == ["hooks.file: 'handler.py' is outside the model's folder"]


def test_invalid_toml_is_reported_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(MistakeError) as caught:
        read(tmp_path, "[batching]\ncap = \n")

    assert caught.value.finding.line == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"[padding.x]\naxis = 0\nvalue = 1{'0' * 400}", "must be a number that a double can hold"),
        (
            f"[batching]\ncap = 0x{'f' * 5000}",
            "must be an integer of at least 1, not a number of thousands of digits (integer)",
        ),
        (f"[instances]\ndevices = [0x{'f' * 5000}]", "not a number of thousands of digits (list)"),
    ],
)
def test_a_number_too_large_to_print_is_a_mistake(tmp_path: Path, text: str, problem: str) -> None:
    _, findings = read(tmp_path, text)

    assert [problem in finding.message for finding in findings] == [True]


def test_an_integer_too_long_for_python_is_invalid_toml(tmp_path: Path) -> None:
    with pytest.raises(MistakeError, match="is not valid TOML: "):
        read(tmp_path, f"[batching]\ncap = 1{'0' * 5000}")


@pytest.mark.parametrize("name", [f"{table}.{key}" for table, keys in KEYS.items() for key in keys])
def test_every_key_is_in_the_docs(name: str) -> None:
    assert f"| `{name}` |" in DOCS.read_text("utf-8")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_table_of_a_provider_is_in_the_docs(provider: str) -> None:
    assert f"| `{provider}` |" in DOCS.read_text("utf-8")


SCALARS = st.one_of(
    st.integers(-(2**70), 2**70).filter(lambda number: -(2**63) <= number < 2**63),
    st.booleans(),
    st.sampled_from(['"auto"', '"cpu"', '"x/../y"', '""', "1.5", "inf", "nan", "1979-05-27", "[]", '[1, "a"]', "{}"]),
)
INSTANCES = ("instances.count", "instances.devices")
WORDS = st.sampled_from(sorted({key for keys in KEYS.values() for key in keys} | {"other", "max_batch"}))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*(table.replace(PADDING, "padding.x") for table in KEYS), "unknown"]),
        st.dictionaries(WORDS, SCALARS, max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_any_key_is_read_or_reported_with_its_line(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, dict[str, Any]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    lines = []
    for table, content in document.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {_text(value)}" for key, value in content.items()]
    stated, findings = read(folder, "\n".join(lines))
    for finding in findings:
        assert 1 <= finding.line <= len(lines)
    faulty = {lines[finding.line - 1] for finding in findings}
    for table, content in document.items():
        for key, value in content.items():
            if table not in {*KEYS, "padding.x"} or f"{key} = {_text(value)}" in faulty or f"[{table}]" in faulty:
                continue
            name = f"{table}.{key}"
            name = "padding" if table == "padding.x" else "instances" if name in INSTANCES else name
            assert name in stated.values


@settings(max_examples=80, deadline=None)
@given(st.text(st.sampled_from("[]=.\"'ab \n#1"), max_size=60))
def test_findings_are_within_the_text_for_any_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        _, findings = read(folder, text)
    except MistakeError as error:
        findings = [error.finding]
    assert all(0 <= finding.line <= text.count("\n") + 1 for finding in findings)
    assert all(line >= 1 for line in key_lines(text).values())
