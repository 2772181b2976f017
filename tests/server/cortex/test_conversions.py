"""Common to all of Cortex's models: answers, errors, the tracker line and the debug log."""

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
    def test_f29_c3_c5_the_error_of_a_hook_names_its_file(
        self, hook: str, error: BaseException, text: str | None
    ) -> None:
        found = model_m().error_for(hook, error)

        assert found is not None
        assert found.code is Code.INVALID
        assert found.message == (
            f"error: handler.py: {hook} request handler: {str(error) if text is None else text}: runtime exception"
        )

    def test_the_error_of_formatting_an_exception_is_reported_if_formatting_fails(self) -> None:
        class Silent(Exception):  # noqa: N818
            def __str__(self) -> str:
                raise ValueError("no text")

        found = flowers(handler="handlers/iris.py").error_for("pre_inference", Silent())

        assert found is not None
        assert (found.code, found.message) == (Code.INVALID, "no text")

    def test_the_type_of_the_formatting_error_is_reported_if_the_error_has_no_text_either(self) -> None:
        class Silent(Exception):  # noqa: N818
            def __str__(self) -> str:
                raise self

        found = flowers().error_for("pre_inference", Silent())

        assert found is not None
        assert found.message == "Silent"


class TestAnswers:
    def test_c1_c2_f26_answers_are_encoded_as_cortex_encoded_them(self) -> None:
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

    def test_c7_a_prediction_can_be_encoded_as_the_answer(self) -> None:
        rules = model_m()
        outputs = [np.array([0]), np.array([[0.5949878692626953, 0.3870449960231781, 0.017967063933610916]], "f4")]

        assert rules.encode_answer(rules.to_prediction(outputs, NONE), NONE) == (
            b"[[0],[[0.5949878692626953,0.3870449960231781,0.017967063933610916]]]\n"
        )

    def test_c24_an_answer_that_cannot_be_encoded_fails_with_code_unknown(self) -> None:
        with pytest.raises(InferError) as error:
            model_m().encode_answer(b"abc", NONE)

        assert error.value.code is Code.UNKNOWN
        assert "bytes" in error.value.message

    def test_c31_f39_a_tracker_line_precedes_the_answer_if_requested(self) -> None:
        rules = model_m(tracker={"model_type": "classification", "key": ""})

        line, _, body = rules.encode_answer("iris-setosa", {"tracked": True}).partition(b"\n")

        assert json.loads(line) == {"class": "iris-setosa"}
        assert body == b'"iris-setosa"\n'
        assert rules.encode_answer("iris-setosa", NONE) == body
        assert rules.encode_answer(None, {"tracked": True}) == b"{}\nnull\n"
        assert model_m().encode_answer(1, {"tracked": True}) == b"{}\n1\n"

    def test_a_tracker_warning_is_one_line(self) -> None:
        rules = model_m(tracker={"model_type": "regression", "key": "a\nb"})

        line, _, body = rules.encode_answer({}, {"tracked": True}).partition(b"\n")

        assert json.loads(line) == {"warning": "failed to track key 'a\nb': not found in prediction"}
        assert body == b"{}\n"


class TestDebug:
    def test_f34_sample_inference_and_answer_are_logged_if_debug_is_requested(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
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

    def test_f34_only_the_inference_is_logged_without_a_handler(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "penstock.hooks")
        rules, debug = model_m(handler=""), {"debug": True}  # the sample is logged by service.py

        rules.to_inputs([1, 2, 3, 4], debug)
        rules.encode_answer(rules.to_prediction([np.array([0]), np.zeros((1, 3))], debug), debug)

        assert [record.getMessage() for record in caplog.records] == ["inference: [[0], [[0.0, 0.0, 0.0]]]"]

    def test_f34_a_rejected_sample_is_logged_before_its_conversion(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "penstock.hooks")

        with pytest.raises(InferError):
            model_m().to_inputs([1, 2], {"debug": True})

        assert [record.getMessage() for record in caplog.records] == ["pre_inference: [1, 2]"]

    def test_f34_values_are_printed_in_a_process_without_log_handlers(
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
    def test_f34_logged_values_are_truncated(self, value: Any, text: str) -> None:
        assert format_value(value) == text

    def test_a_value_whose_repr_fails_is_logged_by_its_type(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "penstock.hooks")

        class Odd:
            def __repr__(self) -> str:
                raise ValueError

        debugging.log_value("pre_inference", [Odd()])

        assert [record.getMessage() for record in caplog.records] == [
            "pre_inference: list that cannot be shown: ValueError"
        ]


def test_the_cortex_dialect_is_registered_by_name() -> None:
    assert DIALECTS["cortex"] == type(model_m()).__module__
    assert callable(make_conversions)


@pytest.mark.slow
def test_the_conversions_import_no_packages_but_numpy_and_orjson() -> None:
    code = (
        "import sys, penstock.server.cortex.conversions\n"
        "known = {'numpy', 'orjson', 'penstock', *sys.stdlib_module_names}\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(name for name in found - known if not name.startswith(('_', 'site', '.'))))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.strip() == "[]"
