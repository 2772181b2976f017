"""Any method that accepts seldon-core's arguments is called, and called once."""

# ruff: noqa: N803 - X is what seldon-core calls it

from __future__ import annotations

import functools
from typing import Any

import pytest

from .component_calls import ask, ask_service, failed, inside

MESSAGE = {"data": {"ndarray": [[1, 2]]}, "meta": {"puid": "p"}}
META = {"puid": "p"}


def _wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return call


def _bare(function: Any) -> Any:
    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return call


class _Plain:
    def predict(self, X: Any, names: Any) -> Any:
        return ["no meta"]


class _Defaulted:
    def predict(self, X: Any, features_names: Any = None) -> Any:
        return ["no meta"]


class _WithMeta:
    def predict(self, X: Any, names: Any, meta: Any) -> Any:
        return [meta]


class _WithDefaultedMeta:
    def predict(self, X: Any, names: Any = (), meta: Any = None) -> Any:
        return [meta]


class _KeywordMeta:
    def predict(self, X: Any, names: Any, *, meta: Any) -> Any:
        return [meta]


class _Keywords:
    def predict(self, X: Any, names: Any, **keywords: Any) -> Any:
        return [keywords["meta"]]


class _Positional:
    def predict(self, *args: Any) -> Any:
        assert len(args) == 2
        return ["no meta"]


class _Anything:
    def predict(self, *args: Any, **keywords: Any) -> Any:
        return [keywords["meta"]]


class _Static:
    @staticmethod
    def predict(X: Any, names: Any, meta: Any = None) -> Any:
        return [meta]


class _OfClass:
    @classmethod
    def predict(cls, X: Any, names: Any) -> Any:
        return ["no meta"]


class _MetaInTheSecondPlace:
    def predict(self, X: Any, meta: Any) -> Any:
        return ["no meta"]


class _Decorated:
    @_wrapped
    def predict(self, X: Any, names: Any) -> Any:
        return ["no meta"]


class _DecoratedBare:
    @_bare
    def predict(self, X: Any, names: Any) -> Any:
        return ["no meta"]


class _DecoratedMetaInTheSecondPlace:
    @_bare
    def predict(self, X: Any, meta: Any) -> Any:
        return ["no meta"]


class _DecoratedWithMeta:
    @_wrapped
    def predict(self, X: Any, names: Any, meta: Any) -> Any:
        return [meta]


class _Partial:
    def __init__(self) -> None:
        self.predict = functools.partial(self._predict, extra=1)

    def _predict(self, X: Any, names: Any, extra: int, meta: Any = None) -> Any:
        return [meta]


class _Callable:
    class Predict:
        def __call__(self, X: Any, names: Any, meta: Any = None) -> Any:
            return [meta]

    predict = Predict()


class _HandsOn:
    def __init__(self) -> None:
        self.tried = self.entered = 0

    def predict(self, X: Any, names: Any, **keywords: Any) -> Any:
        self.tried += 1
        return self.really(X, **keywords)

    def really(self, X: Any) -> Any:
        self.entered += 1
        return ["no meta"]


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        (_Plain, "no meta"), (_Defaulted, "no meta"), (_WithMeta, META), (_WithDefaultedMeta, META),
        (_KeywordMeta, META), (_Keywords, META), (_Positional, "no meta"), (_Anything, META), (_Static, META),
        (_OfClass, "no meta"), (_MetaInTheSecondPlace, "no meta"), (_Decorated, "no meta"),
        (_DecoratedBare, "no meta"), (_DecoratedMetaInTheSecondPlace, "no meta"), (_DecoratedWithMeta, META),
        (_Partial, META), (_Callable, META), (_HandsOn, "no meta"),
    ],
)  # fmt: skip
def test_predict_receives_meta_only_if_its_signature_accepts_meta(component: Any, expected: Any) -> None:
    assert ask(component(), MESSAGE).decoded["data"]["ndarray"] == [expected]


def test_a_builtin_function_does_not_receive_meta() -> None:
    class Compares:
        predict = staticmethod(divmod)

    text = ask(Compares(), {"strData": "a"}).decoded["status"]["info"]
    assert text == "unsupported operand type(s) for divmod(): 'str' and 'list'"


def test_a_method_with_too_few_parameters_fails_with_a_type_error() -> None:
    class One:
        def predict(self, X: Any) -> Any:
            return X

    assert ask(One(), MESSAGE).body == failed("predict() takes 2 positional arguments but 3 were given")


class _Counted:
    def __init__(self) -> None:
        self.calls = 0


class _RaisesWithKeywords(_Counted):
    def predict(self, X: Any, names: Any, **keywords: Any) -> Any:
        self.calls += 1
        raise TypeError("inner")


class _CallsWrongly(_Counted):
    def predict(self, X: Any, names: Any, **keywords: Any) -> Any:
        self.calls += 1
        return self.calls.__float__(X)  # type: ignore[call-arg]


class _RaisesWithMeta(_Counted):
    def predict(self, X: Any, names: Any, meta: Any = None) -> Any:
        self.calls += 1
        raise TypeError("inner")


class _RaisesWithout(_Counted):
    def predict(self, X: Any, names: Any) -> Any:
        self.calls += 1
        raise TypeError("inner")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("component", [_RaisesWithKeywords, _RaisesWithMeta, _RaisesWithout])
def test_a_type_error_raised_by_predict_does_not_call_predict_again(component: Any, strict: bool) -> None:
    user = component()
    assert ask(user, MESSAGE, strict=strict).body == failed("inner")
    assert user.calls == 1


def test_a_type_error_about_arguments_inside_predict_does_not_call_predict_again() -> None:
    user = _CallsWrongly()
    assert ask(user, MESSAGE).body == failed("expected 0 arguments, got 1")
    assert user.calls == 1


def test_a_method_that_cannot_pass_meta_on_is_retried_without_meta_only_once() -> None:
    user = _HandsOn()
    service = inside(user)
    for _ in range(3):
        ask_service(service, MESSAGE)
    assert (user.entered, user.tried) == (3, 4)


def test_a_method_replaced_at_run_time_is_inspected_again() -> None:
    class Replaced:
        def predict(self, X: Any, names: Any) -> Any:
            self.predict = lambda X, names, meta: [meta]  # type: ignore[method-assign, assignment, misc]
            return ["no meta"]

    service = inside(Replaced())
    assert ask_service(service, MESSAGE).decoded["data"]["ndarray"] == ["no meta"]
    assert ask_service(service, MESSAGE).decoded["data"]["ndarray"] == [META]
