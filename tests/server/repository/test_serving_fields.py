"""Fields of a ModelConfig about what happens around a run: warmup samples, the cache, decoupled answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.batching.spec import Sample, SampleInput
from tests.server.repository.configs import read_text

SAMPLE = 'model_warmup {{ name: "s" batch_size: 2 {} }}'
NO_VALUES = "warmup setting expects input 'x' to have input_data_type set"
NO_SHAPE = "warmup setting expects all variable-size dimensions are specified for input 'x'"
INPUT = 'inputs {{ key: "x" value {{ {} }} }}'


def read(text: str, folder: Path = Path("m")) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """Return the values read, and each mistake with its line."""
    parsed, findings = read_text(text, folder=folder)
    return dict(parsed.values), [(finding.line, finding.message) for finding in findings]


def mistakes(text: str, folder: Path = Path("m")) -> list[str]:
    return [message for _, message in read(text, folder)[1]]


def test_response_cache_and_decoupled_are_read() -> None:
    cached, no_mistakes = read("response_cache { enable: true }")
    decoupled, _ = read("model_transaction_policy { decoupled: true }")

    assert (cached, no_mistakes) == ({"cached": True}, [])
    assert decoupled == {"decoupled": True}
    assert read("response_cache { } model_transaction_policy { }") == ({}, [])


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("model_transaction_policy { decoupled: true }", "'Decoupled' transaction policy"),
        ("sequence_batching { }", "sequence batching scheduler"),
    ],
)
def test_models_that_cannot_be_cached_are_rejected_with_the_cache(field: str, text: str) -> None:
    reasons = mistakes(f"response_cache {{ enable: true }} {field}")

    assert (
        f"Response Cache does not currently support model m with {text}. Please disable the response cache." in reasons
    )


def test_warmup_samples_are_read_in_order(tmp_path: Path) -> None:
    inputs = (
        'inputs { key: "b" value { data_type: TYPE_STRING dims: 3 random_data: true } }'
        'inputs { key: "a" value { data_type: TYPE_BF16 zero_data: true } }'
    )
    stated, found = read(
        f'model_warmup {{ name: "two" batch_size: 1 count: 3 {inputs} }}'
        'model_warmup { name: "none" }'
        'model_warmup { name: "one" batch_size: 8 inputs { key: "f" value { data_type: TYPE_INT8 dims: [ 1, 2 ] '
        'input_data_file: "deep/raw" } } }',
        tmp_path,
    )

    assert found == []
    assert stated["samples"] == (
        Sample("two", 1, 3, {"a": SampleInput("BF16", (), "zero"), "b": SampleInput("BYTES", (3,), "random")}),
        Sample("one", 8, 1, {"f": SampleInput("INT8", (1, 2), tmp_path / "warmup" / "deep" / "raw")}),
    )


@pytest.mark.parametrize("kind", ["zero", "random"])
def test_zero_data_and_random_data_count_even_when_false(kind: str) -> None:
    stated, found = read(SAMPLE.format(INPUT.format(f"data_type: TYPE_INT8 dims: 1 {kind}_data: false")))

    assert found == []
    assert stated["samples"] == (Sample("s", 2, 1, {"x": SampleInput("INT8", (1,), kind)}),)


@pytest.mark.parametrize("name", ["", "../raw", "/raw", "deep/../../raw"])
def test_a_sample_file_outside_the_warmup_folder_is_rejected(tmp_path: Path, name: str) -> None:
    text = SAMPLE.format(INPUT.format(f'data_type: TYPE_INT8 dims: 1 input_data_file: "{name}"'))

    assert mistakes(text, tmp_path) in (
        [NO_VALUES],
        [f"'{name}' is outside the model's folder warmup"],
    )


def test_a_sample_file_that_links_out_of_the_warmup_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "m" / "warmup").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    (tmp_path / "m" / "warmup" / "raw").symlink_to(tmp_path / "secret")
    text = SAMPLE.format(INPUT.format('data_type: TYPE_INT8 dims: 1 input_data_file: "raw"'))

    assert mistakes(text, tmp_path / "m") == ["'raw' is outside the model's folder warmup"]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ("dims: 1 zero_data: true", "warmup setting expects input 'x' to have data_type set"),
        ("data_type: TYPE_FP32 dims: 1", NO_VALUES),
        ("data_type: TYPE_FP32 dims: 0 zero_data: true", NO_SHAPE),
        ("data_type: TYPE_FP32 dims: -1 zero_data: true", NO_SHAPE),
    ],
)  # fmt: skip
def test_an_incomplete_sample_is_a_mistake_with_its_line(about: str, message: str) -> None:
    (line, text), *others = read("\n\n" + SAMPLE.format(INPUT.format(about)))[1]

    assert (text, line, others) == (message, 3, [])


def test_a_sample_with_too_many_rows_is_rejected() -> None:
    assert mistakes('model_warmup { name: "s" batch_size: 4000000000 }') == ["warmup sample 's' has 4000000000 rows"]
