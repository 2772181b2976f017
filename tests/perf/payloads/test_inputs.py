"""What --input-data names, read or made."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from penstock.perf.payloads.inputs import Streams, streams
from penstock.perf.payloads.tensors import InputError, Values, elements_of
from penstock.perf.profiling.model import ModelDescription, Tensor
from penstock.perf.profiling.options import Input
from tests.perf.payloads.strategies import model_of
from tests.server.v2.documents import ANYTHING

X = Tensor("x", "INT32", (2,))
FREE = Tensor("x", "INT32", (-1, 2))
WORDS = Tensor("words", "BYTES", (2,))
MAYBE = Tensor("maybe", "INT32", (1,), optional=True)


def ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def file_of(folder: Path, document: Any, name: str = "data.json") -> str:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def read(model: ModelDescription, *paths: str, **input_options: Any) -> Streams:
    return streams(model, Input(source=paths, **input_options))


def rejection(model: ModelDescription, *paths: str, **input_options: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(model, *paths, **input_options)
    return str(caught.value)


def one_step(folder: Path, entry: Any, tensor: Tensor = X, **input_options: Any) -> Values:
    """Give what a file with one step of one input is read as."""
    return read(model_of(tensor), file_of(folder, {"data": [{"x": entry}]}), **input_options).streams[0][0]["x"]


def test_random_input_is_one_step_determined_by_the_seed() -> None:
    model = model_of(X, WORDS, MAYBE)
    read_input = read(model, "random")

    assert not read_input.given
    assert len(read_input.streams) == len(read_input.streams[0]) == 1
    assert read_input.streams[0][0].keys() == {"x", "words", "maybe"}
    assert read_input == read(model, "random")
    assert read_input != read(model, "random", seed=1)
    assert len(elements_of(read_input.streams[0][0]["words"].raw, "")[0]) == 128


def test_zero_input_applies_to_numbers_and_strings_stay_random() -> None:
    row = read(model_of(X, WORDS), "zero", string_length=3).streams[0][0]

    assert row["x"].raw == bytes(8)
    assert [len(each) for each in elements_of(row["words"].raw, "")] == [3, 3]


def test_a_string_can_be_specified() -> None:
    row = read(model_of(WORDS), "random", string="hello").streams[0][0]

    assert elements_of(row["words"].raw, "") == [b"hello", b"hello"]


def test_a_free_dimension_must_be_specified() -> None:
    assert "--shape x:1,2" in rejection(model_of(FREE), "random")
    assert read(model_of(FREE), "random", shapes={"x": (3, 2)}).streams[0][0]["x"].shape == (3, 2)


@pytest.mark.parametrize("shape", [(3,), (3, 3), (-1, 2), (1, 3, 2)])
def test_a_shape_that_does_not_fit_is_rejected(shape: tuple[int, ...]) -> None:
    assert rejection(model_of(FREE), "random", shapes={"x": shape}).startswith("--shape x: ")


def test_a_shape_for_an_unknown_input_is_rejected() -> None:
    assert rejection(model_of(X), "random", shapes={"z": (1,)}).startswith("--shape z: model 'm' has no such input")


def test_shape_tensors_are_not_generated() -> None:
    assert "shape tensor" in rejection(model_of(Tensor("x", "INT32", (2,), shape_tensor=True)), "zero")


def test_a_model_without_inputs_is_rejected() -> None:
    assert "names no inputs; tell them with --input" in rejection(model_of(), "random")


def test_steps_of_all_files_form_one_stream(tmp_path: Path) -> None:
    paths = [file_of(tmp_path, {"data": [{"x": [n, 0]}, {"x": [n, 1]}]}, f"{n}.json") for n in (1, 2)]

    read_input = read(model_of(X), *paths)

    assert read_input.given
    assert [[row["x"].raw for row in stream] for stream in read_input.streams] == [
        [ints(1, 0), ints(1, 1), ints(2, 0), ints(2, 1)]
    ]


def test_streams_of_all_files_follow_each_other(tmp_path: Path) -> None:
    paths = [file_of(tmp_path, {"data": [[{"x": [n, 0]}, {"x": [n, 1]}], [{"x": [n, 2]}]]}, f"{n}") for n in (1, 2)]

    assert [len(stream) for stream in read(model_of(X), *paths).streams] == [2, 1, 2, 1]


@pytest.mark.parametrize(
    "entry",
    [
        [1, 2, 3, 4],
        {"content": [1, 2, 3, 4]},
        {"content": [1, 2, 3, 4], "shape": [2, 2]},
        {"b64": base64.b64encode(ints(1, 2, 3, 4)).decode()},
        {"content": {"b64": base64.b64encode(ints(1, 2, 3, 4)).decode()}, "shape": [2, 2]},
    ],
)
def test_values_may_be_written_in_several_forms(tmp_path: Path, entry: Any) -> None:
    assert one_step(tmp_path, entry, FREE, shapes={"x": (2, 2)}) == Values((2, 2), ints(1, 2, 3, 4))


def test_the_shape_in_a_step_overrides_the_command_line(tmp_path: Path) -> None:
    entry = {"content": [1, 2], "shape": [1, 2]}

    assert one_step(tmp_path, entry, FREE, shapes={"x": (2, 2)}).shape == (1, 2)
    assert one_step(tmp_path, entry, FREE).shape == (1, 2)


def test_non_finite_numbers_may_be_written_as_words(tmp_path: Path) -> None:
    path = file_of(tmp_path, '{"data": [{"x": [NaN, -Infinity]}]}')

    row = read(model_of(Tensor("x", "FP32", (2,))), path).streams[0][0]

    assert np.isnan(np.frombuffer(row["x"].raw, "<f4")[0])


def test_only_optional_inputs_may_be_missing(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"data": [{"x": [1, 2], "model": "is for others"}]})

    assert read(model_of(X, MAYBE), path).streams[0][0].keys() == {"x"}
    assert rejection(model_of(X, WORDS), path).endswith("data[0]: input 'words' is missing")


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("{", "it is no JSON"),
        ("[]", "member 'data'"),
        ({"data": {}}, "member 'data'"),
        ({"data": []}, "member 'data'"),
        ({"data": [{"x": [1, 2]}, [{"x": [1, 2]}]]}, "mixes steps with streams"),
        ({"data": [[]]}, "data[0]: the stream has no steps"),
        ({"data": [[{"x": [1, 2]}, 7]]}, "data[0][1]: a step is an object"),
        ({"data": [{"x": [1, 2], "z": [1]}]}, "data[0]: 'z' is no input"),
        ({"data": [{"x": [1]}]}, "data[0]: input 'x': it has 4 bytes, expected 8"),
        ({"data": [{"x": [[1, 2]]}]}, "in one flat array"),
        ({"data": [{"x": 7}]}, "it has to be an array"),
        ({"data": [{"x": {"shape": [2]}}]}, "it has to be an array"),
        ({"data": [{"x": {"content": [1, 2], "shape": [2.0]}}]}, "'shape' has to be an array of whole numbers"),
        ({"data": [{"x": {"content": [1, 2], "shape": [1]}}]}, "shape [1] does not fit, input 'x' takes [2]"),
        ({"data": [{"x": {"content": {"b64": 7}}}]}, "its b64 has to be a string"),
        ({"data": [{"x": [1, 2]}], "validation_data": []}, "validation_data: it has to have an entry for each"),
        ({"data": [{"x": [1, 2]}], "validation_data": [{"x": [1]}]}, "whose members are outputs"),
    ],
)
def test_an_invalid_file_is_rejected_with_its_name_and_position(tmp_path: Path, document: Any, text: str) -> None:
    path = file_of(tmp_path, document)

    error = rejection(model_of(X), path)

    assert error.startswith(f"--input-data {path}: ")
    assert text in error


def test_a_free_dimension_that_no_step_specifies_is_rejected(tmp_path: Path) -> None:
    assert "neither here ('shape') nor by --shape" in rejection(
        model_of(FREE), file_of(tmp_path, {"data": [{"x": [1, 2]}]})
    )


def test_a_missing_file_is_rejected() -> None:
    assert rejection(model_of(X), "nowhere") == "--input-data nowhere: it cannot be read: No such file or directory"


@pytest.mark.parametrize("nested", [False, True])
def test_expected_outputs_are_read_and_reported_as_not_compared(tmp_path: Path, nested: bool) -> None:
    data, expected = {"x": [1, 2]}, {"y": [0.5]}
    document = {"data": [[data]] if nested else [data], "validation_data": [[expected]] if nested else [expected]}

    (note,) = read(model_of(X), file_of(tmp_path, document)).notes

    assert "validation_data has been read and is not compared" in note


@settings(max_examples=40)
@given(ANYTHING)
def test_any_file_is_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, anything: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    for document in (
        anything,
        {"data": anything},
        {"data": [{"x": anything}]},
        {"data": [{"x": {"content": anything}}]},
    ):
        with suppress(InputError):
            read(model_of(FREE), file_of(folder, document, "anything.json"))


def test_a_folder_has_a_file_for_each_input(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(ints(3, 4))
    (tmp_path / "words").write_bytes(b"one\r\ntwo words\n")
    (tmp_path / "y").write_bytes(b"what is expected")

    read_input = read(model_of(X, WORDS, MAYBE), str(tmp_path))
    row = read_input.streams[0][0]

    assert read_input.given
    assert row["x"] == Values((2,), ints(3, 4))
    assert elements_of(row["words"].raw, "") == [b"one\r", b"two words"]
    assert "maybe" not in row
    assert "not compared" in read_input.notes[0]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"x": ints(1, 2)}, "words: it cannot be read"),
        ({"x": ints(1), "words": b"a\nb"}, "x: it has 4 bytes, expected 8"),
        ({"x": ints(1, 2), "words": b"a"}, "words: it has 1 strings, expected 2"),
        ({"x": ints(1, 2), "words": b""}, "words: the file is empty"),
        ({"x": ints(1, 2), "words": b"a\nb", "z": b""}, "file 'z' is named after no input"),
    ],
)
def test_an_invalid_folder_is_rejected(tmp_path: Path, files: dict[str, bytes], text: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)

    error = rejection(model_of(X, WORDS), str(tmp_path))

    assert error.startswith("--input-data ")
    assert text in error


def test_a_folder_needs_shapes_for_free_dimensions(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(ints(1, 2))

    assert "--shape x:1,2" in rejection(model_of(FREE), str(tmp_path))
    assert read(model_of(FREE), str(tmp_path), shapes={"x": (1, 2)}).streams[0][0]["x"].shape == (1, 2)


def test_whole_numbers_are_accepted_for_floats(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"data": [{"x": [1, 2]}]})

    assert read(model_of(Tensor("x", "FP64", (2,))), path).streams[0][0]["x"].raw == np.array([1.0, 2.0]).tobytes()
