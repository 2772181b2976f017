"""Content: encodes the `content` that a handler returns. Source: abejaruntime 1.1.1, by observed behavior.

An iterable, unless it is a text or a dict, is encoded element by element: bytes unchanged, texts in UTF-8, and anything
else as JSON. Each text and each JSON value has a line of its own. For text/csv, elements become rows. Where the
original sent bytes as decimal digits, or failed, this encoder does better unless `strict`.
"""

from __future__ import annotations

import array
import csv
import datetime as dt
import io
import json
import mmap
from collections.abc import Iterable
from typing import Any

import numpy as np

CSV = "text/csv"
_RAW = (bytes, bytearray, array.array)
_FILES = (io.BytesIO, io.BufferedReader)


class ContentEncoder:
    """Encodes contents. `strict`: as the original, including its errors. Threads: any."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._json = json.JSONEncoder(default=self._plain).encode

    def encode(self, content: Any, media: str) -> bytes:
        """Encode a content for this media type, in lower case and without parameters.

        Raises: any exception of a content that cannot be encoded (TypeError, ValueError and others).
        """
        if content is None:
            return b""
        if isinstance(content, str):
            return content.encode()
        if isinstance(content, dict):
            return self._elements((content,), media) if media == CSV else self._json(content).encode()
        if not self._strict and (octets := _octets(content)) is not None:
            return octets
        if not isinstance(content, Iterable):
            return self._elements((content,), media)
        if _is_empty(content, strict=self._strict):
            return b""
        if type(content) in _FILES:
            return bytes(content.read())  # type: ignore[attr-defined]  # its lines, one after the other
        return self._elements(content, media)

    def _elements(self, content: Iterable[Any], media: str) -> bytes:
        written: list[Any] = []
        rows: csv.DictWriter[Any] | None = None
        for each in content:
            element = _paired(each) if isinstance(each, list) else each
            if isinstance(element, str):
                text = element.encode()
            elif isinstance(element, _RAW):
                written.append(element)
                continue
            elif not self._strict and (octets := _octets(element)) is not None:
                written.append(octets)
                continue
            elif media == CSV:
                if rows is None:
                    rows = csv.DictWriter(_Lines(written), tuple(element.keys()))
                    rows.writeheader()
                rows.writerow(element)
                continue
            else:
                text = self._json(element).encode()
            if written:
                written.append(b"\n")
            written.append(text)
        return b"".join(written)

    def _plain(self, value: Any) -> Any:
        """Return a JSON substitute for a value that JSON lacks."""
        if isinstance(value, dt.datetime):
            return value.isoformat()
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, np.integer):
            return int(value)
        if isinstance(value, np.floating):
            return float(value)
        if isinstance(value, np.bool_) and not self._strict:
            return bool(value)
        raise TypeError(f"a content of type {type(value).__name__} cannot be written as JSON")


class _Lines:
    """A file for the rows of a table."""

    def __init__(self, written: list[Any]) -> None:
        self._written = written

    def write(self, line: str) -> None:
        self._written.append(line.encode())


def _octets(content: Any) -> bytes | None:
    """Return the bytes of an object that consists of bytes; None for any other."""
    if isinstance(content, bytes | bytearray):
        return bytes(content)
    if isinstance(content, memoryview):
        return content.tobytes() if content.itemsize == 1 else None
    if isinstance(content, array.array):
        return content.tobytes() if content.itemsize == 1 else None
    return content[:] if isinstance(content, mmap.mmap) else None


def _is_empty(content: Any, *, strict: bool) -> bool:
    if isinstance(content, np.ndarray) and (content.size == 0 or (content.size > 1 and not strict)):
        return content.size == 0
    return not content


def _paired(element: list[Any]) -> Any:
    """Return the dict of a list of pairs; any other list unchanged.

    Raises: ValueError for iterable elements that are not pairs.
    """
    try:
        return dict(element)
    except TypeError:
        return element
