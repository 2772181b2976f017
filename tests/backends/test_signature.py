from __future__ import annotations

import pytest

from penstock.backends.signature import TensorSpec


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ((), (5, 2, 5)),
        (("batch", "", "length"), (5, 2, 5)),
        (("batch", "", "past_length + length"), (5, 2, 10)),
        (("batch", "", "past_length + 1"), (5, 2, 6)),
        (("batch", "ignored + ignored", "2+length+length"), (5, 2, 12)),
    ],
)
def test_an_axis_named_as_a_sum_is_as_long_as_its_terms_together(
    axes: tuple[str, ...], expected: tuple[int, ...]
) -> None:
    assert TensorSpec("x", "FP32", (-1, 2, -1), axes=axes).shape_with(5) == expected
