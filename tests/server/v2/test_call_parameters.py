"""The parameters of a call and of its version, as both transports parse them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InSequence
from penstock.server.v2.call_parameters import RESERVED, Options, parse_location, parse_parameters, parse_version


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(InferError) as caught:
        call(*args)
    assert caught.value.code is Code.INVALID
    return caught.value.message


class TestParseVersion:
    @pytest.mark.parametrize(("text", "version"), [("", ""), ("1", "1"), ("01", "1"), ("0", "0")])
    def test_leading_zeros_of_a_version_are_ignored(self, text: str, version: str) -> None:
        assert parse_version(text) == version

    @pytest.mark.parametrize("text", ["-1", "-01", "-999999999999999999"])
    def test_a_negative_version_is_rejected_with_tritons_message(self, text: str) -> None:
        assert refused(parse_version, text) == (
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )

    @pytest.mark.parametrize("text", ["v3", "latest", "-", "--1", "-x", "9" * 19, "-" + "9" * 30])
    def test_a_version_that_is_not_a_number_is_rejected_with_tritons_message(self, text: str) -> None:
        assert refused(parse_version, text) == (
            f"failed to get model version from specified version string '{text}' (details: stol), version should be an "
            "integral value > 0"
        )


class TestParameters:
    def test_protocol_parameters_are_parsed_and_unknown_parameters_are_kept_for_the_hooks(self) -> None:
        own = {"s": "text", "i": -1, "b": True, "d": 0.5}
        known = {
            "timeout": 7,
            "priority": 2**64 - 1,
            "sequence_id": "a",
            "sequence_start": True,
            "binary_data_output": True,
        }

        expected = Options(timeout_us=7, parameters=own, priority=2**64 - 1, sequence=InSequence("a", start=True))
        assert parse_parameters(own | known) == (expected, True)
        assert parse_parameters({"hooks": False}) == (Options(hooks=False), False)

    @pytest.mark.parametrize(("ms", "us"), [(20, 20_000), (0.25, 250), (1e-9, 1)])
    def test_a_latency_target_is_parsed_as_milliseconds(self, ms: float, us: int) -> None:
        assert parse_parameters({"latency_target_ms": ms}) == (Options(target_us=us), False)

    @pytest.mark.parametrize("value", [0, -1, True, "5", float("nan"), float("inf"), 86_400_001])
    def test_a_latency_target_outside_one_day_is_rejected(self, value: Any) -> None:
        assert refused(parse_parameters, {"latency_target_ms": value}) == (
            "Unable to parse 'latency_target_ms': expected a number above 0, at most 86400000"
        )

    @pytest.mark.parametrize("value", [None, [1], {"a": 1}, b"x"])
    def test_a_parameter_that_is_not_a_string_number_or_boolean_is_rejected(self, value: Any) -> None:
        assert refused(parse_parameters, {"k": value}) == (
            "parameter 'k' has invalid type. It should be either 'int', 'bool', 'string' or 'double'."
        )

    @pytest.mark.parametrize("key", ["timeout", "priority"])
    @pytest.mark.parametrize("value", [-1, 1.5, "1", True, 2**64])
    def test_a_timeout_or_priority_that_is_not_an_unsigned_integer_is_rejected(self, key: str, value: Any) -> None:
        assert refused(parse_parameters, {key: value}).startswith(f"Unable to parse '{key}'")

    @pytest.mark.parametrize("key", ["sequence_start", "sequence_end", "binary_data_output", "hooks"])
    def test_a_flag_parameter_that_is_not_a_boolean_is_rejected(self, key: str) -> None:
        assert refused(parse_parameters, {key: 1}).startswith(f"Unable to parse '{key}'")

    def test_a_hundred_thousand_parameters_are_parsed_in_linear_time(self) -> None:
        many = {f"k{number}": number for number in range(100_000)}
        start = time.process_time()

        assert parse_parameters(many)[0].parameters == many
        assert time.process_time() - start < 5

    def test_a_reserved_parameter_is_rejected_unless_the_transport_allows_it(self) -> None:
        assert "reserved for Triton usage" in refused(parse_parameters, {"triton_x": 1})
        assert "reserved for Triton usage" in refused(parse_parameters, {"headers": "x"})
        assert "reserved for Triton usage" in refused(parse_parameters, {"triton_y": 1}, ("triton_x",))
        assert parse_parameters({"triton_x": True}, ("triton_x",))[0].parameters is None

    def test_seven_parameter_names_are_reserved(self) -> None:
        assert len(RESERVED) == 7


class TestLocation:
    def test_a_location_is_a_region_an_offset_and_a_size(self) -> None:
        items = {"shared_memory_region": "r", "shared_memory_offset": 4, "shared_memory_byte_size": 8}

        assert parse_location(items) == ("r", 4, 8)

    @pytest.mark.parametrize("region", [None, 5, ["r"], b"r"])
    def test_a_region_whose_name_is_not_a_string_is_rejected(self, region: Any) -> None:
        assert refused(parse_location, {"shared_memory_region": region, "shared_memory_byte_size": 8}) == (
            "Unable to parse 'shared_memory_region': attempt to access JSON non-string as string"
        )
