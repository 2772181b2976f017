"""What a server says of a model, read into one description."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.perf.profiling.model import UNKNOWN_BATCH_SIZE, DescriptionError, Tensor, describe_model

IMAGE = {"name": "image", "datatype": "FP32", "shape": [-1, 3, -1]}
WORD = {"name": "word", "datatype": "BYTES", "shape": ["-1", "1"]}


class Server:
    """Answers with what the test has put in, and remembers whose configuration was asked for."""

    def __init__(self, configs: dict[str, dict[str, Any]], **metadata: Any) -> None:
        self.configs = configs
        self.requests: list[tuple[str, str]] = []
        self._metadata = metadata

    def metadata(self, model: str, version: str) -> dict[str, Any]:
        return {"name": model, "platform": "p", "inputs": [IMAGE], "outputs": [WORD], **self._metadata}

    def config(self, model: str, version: str) -> dict[str, Any]:
        self.requests.append((model, version))
        return self.configs.get(model, {})


def configured(**config: Any) -> Server:
    return Server({"m": {"max_batch_size": 8, **config}})


def test_shapes_of_a_batching_model_omit_the_rows() -> None:
    description = describe_model(configured(), "m", "2")

    assert description.inputs == (Tensor("image", "FP32", (3, -1)),)
    assert description.outputs == (Tensor("word", "BYTES", (1,)),)
    assert (description.name, description.version, description.platform, description.max_batch_size) == (
        "m",
        "2",
        "p",
        8,
    )


def test_shapes_of_a_model_that_does_not_batch_are_complete() -> None:
    description = describe_model(configured(max_batch_size=0), "m")

    assert description.inputs[0].shape == (-1, 3, -1)
    assert not description.batched


def test_without_a_configuration_a_free_first_dimension_of_all_inputs_is_rows() -> None:
    assert describe_model(Server({}), "m").max_batch_size == UNKNOWN_BATCH_SIZE
    assert describe_model(Server({}), "m").inputs[0].shape == (3, -1)
    assert describe_model(Server({}, inputs=[IMAGE, {**WORD, "shape": [1]}]), "m").inputs[0].shape == (-1, 3, -1)
    assert describe_model(Server({}, inputs=[], outputs=None), "m").max_batch_size == 0


def test_numbers_written_as_text_are_parsed() -> None:
    server = Server({"m": {"max_batch_size": "4"}})

    assert describe_model(server, "m").max_batch_size == 4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"sequence_batching": {}}, (True, False)),
        ({"sequence_batching": None}, (False, False)),
        ({"dynamic_batching": {}}, (False, True)),
        ({"dynamic_batching": None}, (False, False)),
        ({}, (False, False)),
    ],
)
def test_a_scheduler_that_is_null_is_absent(config: dict[str, Any], expected: tuple[bool, bool]) -> None:
    description = describe_model(configured(**config), "m")

    assert (description.sequences, description.dynamic_batching) == expected


def test_a_model_may_be_decoupled_and_cached() -> None:
    description = describe_model(
        configured(model_transaction_policy={"decoupled": True}, response_cache={"enable": True}), "m"
    )
    undecoupled = describe_model(configured(model_transaction_policy={"decoupled": False}, response_cache=None), "m")

    assert (description.decoupled, description.response_cache) == (True, True)
    assert (undecoupled.decoupled, undecoupled.response_cache) == (False, False)


def test_the_configuration_marks_shape_tensors_and_optional_inputs() -> None:
    description = describe_model(configured(input=[{"name": "image", "is_shape_tensor": True, "optional": True}]), "m")

    assert description.inputs[0].shape_tensor
    assert description.inputs[0].optional


@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_tensor_in_the_configuration_but_not_in_the_metadata_is_an_error(kind: str) -> None:
    with pytest.raises(DescriptionError, match=f"no metadata found for {kind} tensor 'ghost'"):
        describe_model(configured(**{kind: [{"name": "ghost"}]}), "m")


def test_unreadable_metadata_is_an_error() -> None:
    with pytest.raises(DescriptionError, match="cannot be read"):
        describe_model(Server({}, inputs=[{"name": "x", "datatype": "FP32"}]), "m")


def test_an_ensemble_is_followed_to_all_depths_and_a_cycle_ends() -> None:
    def steps(*models: tuple[str, int]) -> dict[str, Any]:
        return {"ensemble_scheduling": {"step": [{"model_name": name, "model_version": v} for name, v in models]}}

    server = Server(
        {
            "m": {"max_batch_size": 8, **steps(("a", -1), ("b", 3))},
            "a": steps(("c", -1), ("m", -1)),
            "c": {"sequence_batching": {}, "response_cache": {"enable": True}},
        }
    )

    description = describe_model(server, "m")

    assert description.composing == (("a", ""), ("c", ""), ("m", ""), ("b", "3"))
    assert description.sequences
    assert description.response_cache


def test_models_that_a_model_calls_are_listed_with_those_it_is_composed_of() -> None:
    server = Server({"m": {"max_batch_size": 8}, "bls": {"sequence_batching": {}}})

    description = describe_model(server, "m", bls=[("bls", "1"), ("other", "")])

    assert description.composing == (("bls", "1"), ("other", ""))
    assert not description.sequences


def test_inputs_missing_from_the_metadata_can_be_declared() -> None:
    server = Server({}, inputs=[], outputs=[])

    description = describe_model(server, "m", inputs=[IMAGE])

    assert (description.inputs, description.max_batch_size) == ((Tensor("image", "FP32", (3, -1)),), UNKNOWN_BATCH_SIZE)
    with pytest.raises(DescriptionError, match="--input: the server names the inputs of model 'm' itself"):
        describe_model(Server({}), "m", inputs=[IMAGE])
