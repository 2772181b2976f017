"""Snapshot: a ModelSpec, or a similar frozen dataclass, as JSON and back, for another process.

The encoding follows from the types of the fields alone, so a new field needs no change here.
Called by `model_table.py`.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import operator
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_DATETIME_KEY = "\0moment"
"""The key of a date or time among free-form configuration values; no such document has it."""
_DATETIME_TYPES: tuple[type[dt.datetime | dt.date | dt.time], ...] = (dt.datetime, dt.date, dt.time)


class _Codec(NamedTuple):
    """How values of one type are encoded and decoded. `fits` returns whether a value is of the type."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    fits: Callable[[Any], bool]


def write(value: Any) -> Any:
    """Encode a dataclass as JSON values. Raises: TypeError for a value that a field may not hold."""
    kind: Any = type(value)
    return _codec(kind).write(value)


def read(kind: type[T], written: Any) -> T:
    """Decode the result of `write`. Raises: ValueError or TypeError for anything else."""
    hint: Any = kind
    value: T = _codec(hint).read(written)
    return value


@cache
def _codec(hint: Hashable) -> _Codec:
    """Return the codec of a type hint. Raises: TypeError if there is none."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _dataclass_codec(typing.cast("type[Any]", hint))
    if origin in {types.UnionType, typing.Union}:
        return _union_codec(args)
    if origin is tuple:
        return _tuple_codec(args)
    if origin is Mapping:
        return _mapping_codec(*args)
    if hint is Any:
        return _Codec(_write_any, _read_any, lambda _: True)
    if hint is Path:
        return _Codec(
            lambda value: str(_checked(value, Path)),
            lambda written: Path(_checked(written, str)),
            _instance_check(Path),
        )
    if hint is int:
        return _Codec(operator.index, lambda written: _checked(written, int), _instance_check(int))
    if hint is float:
        return _Codec(_checked_number, _checked_number, lambda value: isinstance(value, int | float))
    if hint in {bool, str}:
        return _Codec(
            lambda value: _checked(value, hint), lambda written: _checked(written, hint), _instance_check(hint)
        )
    raise TypeError(f"no snapshot of {hint}")


def _dataclass_codec(kind: type[Any]) -> _Codec:
    hints = typing.get_type_hints(kind)
    codecs = {field.name: _codec(hints[field.name]) for field in dataclasses.fields(kind)}

    def write_fields(value: Any) -> Any:
        _checked(value, kind)
        return {name: codec.write(getattr(value, name)) for name, codec in codecs.items()}

    def read_fields(written: Any) -> Any:
        _checked(written, dict)
        if written.keys() != codecs.keys():
            raise ValueError(f"a snapshot of {kind.__name__} with other fields: {sorted(written.keys() ^ codecs)}")
        return kind(**{name: codec.read(written[name]) for name, codec in codecs.items()})

    return _Codec(write_fields, read_fields, _instance_check(kind))


def _union_codec(hints: tuple[Any, ...]) -> _Codec:
    """Encode a value with the position of its type, except None, and a value of an optional's only type."""
    codecs = [_codec(hint) for hint in hints if hint is not type(None)]
    optional = len(codecs) < len(hints)

    def position_of(value: Any) -> int:
        return next((index for index, codec in enumerate(codecs) if codec.fits(value)), -1)

    def write_one(value: Any) -> Any:
        if value is None and optional:
            return None
        if len(codecs) == 1:
            return codecs[0].write(value)
        index = position_of(value)
        if index < 0:
            raise TypeError(f"{value!r} is not one of {hints}")
        return [index, codecs[index].write(value)]

    def read_one(written: Any) -> Any:
        if written is None and optional:
            return None
        if len(codecs) == 1:
            return codecs[0].read(written)
        index, value = _checked(written, list)
        if not 0 <= _checked(index, int) < len(codecs):
            raise ValueError(f"a snapshot of one of {hints}, the number {index}")
        return codecs[index].read(value)

    return _Codec(write_one, read_one, lambda value: (value is None and optional) or position_of(value) >= 0)


def _tuple_codec(hints: tuple[Any, ...]) -> _Codec:
    if len(hints) == 2 and hints[1] is Ellipsis:
        one = _codec(hints[0])
        return _Codec(
            lambda value: [one.write(each) for each in _checked(value, tuple)],
            lambda written: tuple([one.read(each) for each in _checked(written, list)]),
            _instance_check(tuple),
        )
    codecs = [_codec(hint) for hint in hints]
    return _Codec(
        lambda value: [codec.write(each) for codec, each in zip(codecs, _checked(value, tuple), strict=True)],
        lambda written: tuple([codec.read(each) for codec, each in zip(codecs, _checked(written, list), strict=True)]),
        _instance_check(tuple),
    )


def _mapping_codec(key: Any, value: Any) -> _Codec:
    """Encode as pairs, since JSON's own keys are strings."""
    keys, values = _codec(key), _codec(value)

    def write_pairs(mapping: Any) -> Any:
        return [[keys.write(name), values.write(each)] for name, each in _checked(mapping, Mapping).items()]

    def read_pairs(written: Any) -> Any:
        return {keys.read(name): values.read(each) for name, each in _checked(written, list)}

    return _Codec(write_pairs, read_pairs, _instance_check(Mapping))


def _write_any(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_checked(name, str): _write_any(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_write_any(each) for each in value]
    if isinstance(value, _DATETIME_TYPES):
        return {_DATETIME_KEY: [_DATETIME_TYPES.index(type(value)), value.isoformat()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"no snapshot of {type(value).__name__}")


def _read_any(written: Any) -> Any:
    if isinstance(written, list):
        return [_read_any(each) for each in written]
    if not isinstance(written, dict):
        return written
    if written.keys() == {_DATETIME_KEY}:
        type_index, text = written[_DATETIME_KEY]
        return _DATETIME_TYPES[type_index].fromisoformat(text)
    return {name: _read_any(each) for name, each in written.items()}


def _instance_check(kind: type[Any]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _checked_number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value


def _checked(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value
