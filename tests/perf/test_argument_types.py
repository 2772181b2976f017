"""Numbers of the command lines are what the flag can mean, or the word is refused by name."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.argument_types import non_negative_float, positive_float, positive_int, share
from penstock.perf.batching import main as compare_policies
from penstock.perf.tuning.arguments import make_parser as tuning_parser

Read = Callable[[str], float]


@pytest.mark.parametrize(
    ("read", "word", "number"),
    [
        (positive_int, "1", 1),
        (positive_float, "0.5", 0.5),
        (non_negative_float, "0", 0),
        (share, "1", 1),
        (share, "0.99", 0.99),
    ],
)
def test_numbers_within_bounds_are_parsed(read: Read, word: str, number: float) -> None:
    assert read(word) == number


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (positive_int, "0 -1 1.5 two"),
        (positive_float, "0 -1 nan inf -inf two"),
        (non_negative_float, "-1 nan inf two"),
        (share, "0 1.1 nan two"),
    ],
)
def test_invalid_numbers_are_rejected_by_name(read: Read, words: str) -> None:
    for word in words.split():
        with pytest.raises(argparse.ArgumentTypeError, match=f"^'{word}' is not "):
            read(word)


@given(st.text())
def test_any_text_is_parsed_or_rejected(word: str) -> None:
    for read in (positive_int, positive_float, non_negative_float, share):
        with contextlib.suppress(argparse.ArgumentTypeError):
            assert read(word) >= 0


def test_a_search_needs_at_least_one_core(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tuning_parser().parse_args(["--out", "found", "--cores", "-1"])

    assert "'-1' is not a whole number above 0" in capsys.readouterr().err


def test_selecting_the_best_static_setting_takes_at_least_one_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench-batching", "--choosing", "0"])

    with pytest.raises(SystemExit):
        compare_policies()

    assert "'0' is not a whole number above 0" in capsys.readouterr().err
