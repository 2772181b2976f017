"""What all of Cortex's models have in common: answers, failures, the tracker's line and the debug log."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.cortex import debugging
from penstock.server.cortex.debugging import format_value
from penstock.server.hooks.conversions import DIALECTS, make_conversions
from tests.server.cortex.values import NONE, flowers, model_m


class TestFailures:
    @pytest.mark.parametrize(
        ("hook", "error", "text"),
        [
            ("pre_inference", KeyError("sepal_width"), "'sepal_width'"),  # C5
            ("pre_inference", TypeError("'NoneType' object is not subscriptable"), None),  # C3
            ("post_inference", InferError(Code.NOT_FOUND, "no such flower"), None),
            ("post_inference", SystemExit(3), "3"),
            ("pre_inference", ValueError(), ""),
        ],
    )
    def test_f29_c3_c5_a_hooks_failure_names_its_file(self, hook: str, error: BaseException, text: str | None) -> None:
        found = model_m().error_for(hook, error)

        assert found is not None
        assert found.code is Code.INVALID
        assert found.message == (
            f"error: handler.py: {hook} request handler: {str(error) if text is None else text}: runtime exception"
        )

    def test_of_an_exception_that_cannot_be_written_what_its_writing_raised_is_told(self) -> None:
        class Silent(Exception):  # noqa: N818
            def __str__(self) -> str:
                raise ValueError("no text")

        found = flowers(handler="handlers/iris.py").error_for("pre_inference", Silent())

        assert found is not None
        assert (found.code, found.message) == (Code.INVALID, "no text")

    def test_an_exception_whose_failure_cannot_be_written_either_has_that_one_s_type(self) -> None:
        class Silent(Exception):  # noqa: N818
            def __str__(self) -> str:
                raise self

        found = flowers().error_for("pre_inference", Silent())

        assert found is not None
        assert found.message == "Silent"


class TestAnswers:
    def test_c1_c2_f26(self) -> None:
        answer = {
            "probabilities": [0.5949878692626953, 0.3870449960231781, 0.017967063933610916],
            "class_label": "iris-setosa",
            "class_index": np.int64(0),
        }

        assert model_m().encode_answer("iris-setosa", NONE) == b'"iris-setosa"\n'
        assert model_m().encode_answer(answer, NONE) == (
            b'{"class_index":0,"class_label":"iris-setosa",'
            b'"probabilities":[0.5949878692626953,0.3870449960231781,0.017967063933610916]}\n'
        )

    def test_c7_a_prediction_is_an_answer(self) -> None:
        rules = model_m()
        outputs = [np.array([0]), np.array([[0.5949878692626953, 0.3870449960231781, 0.017967063933610916]], "f4")]

        assert rules.encode_answer(rules.to_prediction(outputs, NONE), NONE) == (
            b"[[0],[[0.5949878692626953,0.3870449960231781,0.017967063933610916]]]\n"
        )

    def test_c24_an_answer_that_cannot_be_encoded_is_unknown(self) -> None:
        with pytest.raises(InferError) as error:
            model_m().encode_answer(b"abc", NONE)

        assert error.value.code is Code.UNKNOWN
        assert "bytes" in error.value.message

    def test_c31_f39_where_it_is_asked_for_a_line_says_what_is_tracked(self) -> None:
        rules = model_m(tracker={"model_type": "classification", "key": ""})

        line, _, body = rules.encode_answer("iris-setosa", {"tracked": True}).partition(b"\n")

        assert json.loads(line) == {"class": "iris-setosa"}
        assert body == b'"iris-setosa"\n'
        assert rules.encode_answer("iris-setosa", NONE) == body
        assert rules.encode_answer(None, {"tracked": True}) == b"{}\nnull\n"
        assert model_m().encode_answer(1, {"tracked": True}) == b"{}\n1\n"

    def test_a_warning_is_one_line(self) -> None:
        rules = model_m(tracker={"model_type": "regression", "key": "a\nb"})

        line, _, body = rules.encode_answer({}, {"tracked": True}).partition(b"\n")

        assert json.loads(line) == {"warning": "failed to track key 'a\nb': not found in prediction"}
        assert body == b"{}\n"


class TestDebug:
    def test_f34_the_values_on_the_way_are_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "penstock.hooks")
        rules, debug = model_m(), {"debug": True}

        for parameters in (NONE, {"debug": "true"}, debug):
            rules.to_inputs({"input": [1, 2, 3, 4]}, parameters)
            rules.to_prediction([np.array([0]), np.array([[0.5, 0.25, 0.25]], np.float32)], parameters)
            rules.encode_answer("iris-setosa", parameters)

        assert [record.getMessage() for record in caplog.records] == [
            'pre_inference: {"input": [1, 2, 3, 4]}',
            "inference: [[0], [[0.5, 0.25, 0.25]]]",
            'post_inference: "iris-setosa"',
        ]

    def test_f34_without_a_handler_there_is_an_inference_alone(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "penstock.hooks")
        rules, debug = model_m(handler=""), {"debug": True}  # the sample is logged by service.py

        rules.to_inputs([1, 2, 3, 4], debug)
        rules.encode_answer(rules.to_prediction([np.array([0]), np.zeros((1, 3))], debug), debug)

        assert [record.getMessage() for record in caplog.records] == ["inference: [[0], [[0.0, 0.0, 0.0]]]"]

    def test_f34_what_is_refused_is_logged_before(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "penstock.hooks")

        with pytest.raises(InferError):
            model_m().to_inputs([1, 2], {"debug": True})

        assert [record.getMessage() for record in caplog.records] == ["pre_inference: [1, 2]"]

    def test_f34_a_process_without_a_log_prints(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logging.Logger, "hasHandlers", lambda _: False)

        debugging.log_value("inference", [1])

        assert capsys.readouterr().out == "inference: [1]\n"

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("a", '"a"'),
            ("a" * 501, f'"{"a" * 497}..."'),
            ("a" * 500, f'"{"a" * 500}"'),
            (list(range(11)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...]"),
            (np.arange(10), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"),
            (np.zeros((2, 11)), f"[[{'0.0, ' * 10}...], [{'0.0, ' * 10}...]]"),
            (np.array(5), "5"),
            (dict.fromkeys(range(11), 1), f"{{{', '.join(f'{key}: 1' for key in range(10))}, ...}}"),
            ({"a": ("b", None)}, '{"a": ["b", None]}'),
            (10**600, f"1{'0' * 496}..."),
            ({1}, "{1}"),
            (b"ab", "[97, 98]"),
        ],
    )
    def test_f34_values_are_cut_short(self, value: Any, text: str) -> None:
        assert format_value(value) == text

    def test_a_value_that_cannot_be_shown_changes_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "penstock.hooks")

        class Odd:
            def __repr__(self) -> str:
                raise ValueError

        debugging.log_value("pre_inference", [Odd()])

        assert [record.getMessage() for record in caplog.records] == [
            "pre_inference: list that cannot be shown: ValueError"
        ]


def test_the_dialect_is_made_by_its_name() -> None:
    assert DIALECTS["cortex"] == type(model_m()).__module__
    assert callable(make_conversions)


@pytest.mark.slow
def test_a_worker_needs_no_more_than_numpy_and_orjson() -> None:
    code = (
        "import sys, penstock.server.cortex.conversions\n"
        "known = {'numpy', 'orjson', 'penstock', *sys.stdlib_module_names}\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(name for name in found - known if not name.startswith(('_', 'site', '.'))))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.strip() == "[]"
