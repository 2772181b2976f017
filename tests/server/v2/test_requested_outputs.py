"""The outputs that a call requests: those of its model, and those that only its hooks provide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.v2.call_parameters import MAX_CLASSES, Classes, PerOutputPlan, Plan
from penstock.server.v2.regions import DISABLED_TEXT, Regions
from penstock.server.v2.requested_outputs import parse_outputs, select_outputs
from tests.fakes import fake_model, fake_request

MODEL = fake_model()


def refused(entries: list[Any], regions: Regions | None = None) -> str:
    with pytest.raises(InferError) as caught:
        parse_outputs(MODEL, entries, regions)
    assert caught.value.code is Code.INVALID
    return caught.value.message


class TestParseOutputs:
    def test_each_output_gets_the_requested_form(self) -> None:
        assert parse_outputs(MODEL, [("y", None)], None) == ((0,), None)
        assert parse_outputs(MODEL, [("y", {"binary_data": False})], None) == ((0,), None)
        assert parse_outputs(MODEL, [("y", {"binary_data": True})], None) == ((0,), (True,))
        assert parse_outputs(MODEL, [("y", {"classification": 3})], None) == (
            (0,),
            PerOutputPlan((Classes(3, binary=False),)),
        )
        assert parse_outputs(MODEL, [("y", {"classification": 0, "binary_data": True})], None) == ((0,), (True,))

    @pytest.mark.parametrize("value", [-1, 1.0, "3", True, None, 2**64])
    def test_a_classification_count_that_is_not_an_unsigned_integer_is_rejected(self, value: Any) -> None:
        assert refused([("y", {"classification": value})]).startswith("Unable to set 'classification'")

    def test_a_classification_count_above_the_maximum_is_rejected(self) -> None:
        assert "the maximum is 1000000" in refused([("y", {"classification": MAX_CLASSES + 1})])

    def test_an_unknown_or_duplicate_output_is_rejected(self) -> None:
        assert refused([("z", None)]) == "unexpected inference output 'z' for model 'm'"
        text = "Duplicate output name 'y' is not allowed in a request"
        assert refused([("y", None)] * 2) == text

    @pytest.mark.parametrize(
        ("items", "text"),
        [
            ({"classification": 1}, "Output can't set both 'shared_memory_region' and 'classification'"),
            ({"binary_data": True}, "Output can't set both 'shared_memory_region' and 'binary_data'"),
            ({"shared_memory_offset": -1}, "Unable to parse 'shared_memory_offset': "),
            ({"shared_memory_byte_size": "1"}, "Unable to parse 'shared_memory_byte_size': "),
            ({"shared_memory_region": 1}, "Unable to parse 'shared_memory_region': "),
        ],
    )
    def test_an_output_in_shared_memory_cannot_also_be_classified_or_binary(
        self, items: dict[str, Any], text: str
    ) -> None:
        regions = Regions(allowed=True)

        assert refused([("y", {"shared_memory_region": "r"} | items)], regions).startswith(text)

    def test_an_output_of_the_hooks_has_a_form_but_cannot_be_in_shared_memory(self) -> None:
        model = fake_model()
        model.hooks_name_outputs = True
        _, plan = parse_outputs(model, [("note", {"binary_data": True})], None, hooks=True)

        assert isinstance(plan, PerOutputPlan)
        with pytest.raises(InferError, match="unexpected inference output 'note' for model 'm'"):
            parse_outputs(model, [("note", {"shared_memory_region": "r"})], Regions(allowed=True), hooks=True)

    @pytest.mark.parametrize("regions", [None, Regions()])
    def test_an_output_in_shared_memory_is_unsupported_while_shared_memory_is_disabled(
        self, regions: Regions | None
    ) -> None:
        with pytest.raises(InferError) as caught:
            parse_outputs(MODEL, [("y", {"shared_memory_region": "r"})], regions)

        assert (caught.value.code, caught.value.message) == (Code.UNSUPPORTED, DISABLED_TEXT)


@pytest.mark.parametrize(("plan", "binary"), [(None, False), ((True,), True), ((False,), False)])
@pytest.mark.parametrize("requested", [(0,), None], ids=["requested", "all"])
def test_outputs_under_other_names_are_binary_if_all_of_the_models_were_requested_as_binary(
    plan: Plan, binary: bool, requested: tuple[int, ...] | None
) -> None:
    request = fake_request(MODEL)
    if requested is not None:
        request.output_positions = requested

    assert select_outputs(request, plan, {"z": np.zeros(1)}) == {"z": binary}
