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
_RAW_TYPES = (bytes, bytearray, array.array)
_FILE_TYPES = (io.BytesIO, io.BufferedReader)


class ContentEncoder:
    """Encodes contents. `strict`: as the original, including its errors. Threads: any."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._json = json.JSONEncoder(default=self._to_json_type).encode

    def encode(self, content: Any, media: str) -> bytes:
        """Encode a content for this media type, in lower case and without parameters.

        Raises: any exception of a content that cannot be encoded (TypeError, ValueError and others).
        """
        if content is None:
            return b""
        if isinstance(content, str):
            return content.encode()
        if isinstance(content, dict):
            return self._encode_elements((content,), media) if media == CSV else self._json(content).encode()
        if not self._strict and (raw_bytes := _raw_bytes(content)) is not None:
            return raw_bytes
        if not isinstance(content, Iterable):
            return self._encode_elements((content,), media)
        if _is_empty(content, strict=self._strict):
            return b""
        if type(content) in _FILE_TYPES:
            return bytes(content.read())  # type: ignore[attr-defined]  # its lines, one after the other
        return self._encode_elements(content, media)

    def _encode_elements(self, content: Iterable[Any], media: str) -> bytes:
        chunks: list[Any] = []
        rows: csv.DictWriter[Any] | None = None
        for each in content:
            element = _pairs_to_dict(each) if isinstance(each, list) else each
            if isinstance(element, str):
                text = element.encode()
            elif isinstance(element, _RAW_TYPES):
                chunks.append(element)
                continue
            elif not self._strict and (raw_bytes := _raw_bytes(element)) is not None:
                chunks.append(raw_bytes)
                continue
            elif media == CSV:
                if rows is None:
                    rows = csv.DictWriter(_CsvFile(chunks), tuple(element.keys()))
                    rows.writeheader()
                rows.writerow(element)
                continue
            else:
                text = self._json(element).encode()
            if chunks:
                chunks.append(b"\n")
            chunks.append(text)
        return b"".join(chunks)

    def _to_json_type(self, value: Any) -> Any:
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
        raise TypeError(f"content of type {type(value).__name__} cannot be written as JSON")


class _CsvFile:
    """A file for the rows of a table."""

    def __init__(self, chunks: list[Any]) -> None:
        self._chunks = chunks

    def write(self, line: str) -> None:
        self._chunks.append(line.encode())


def _raw_bytes(content: Any) -> bytes | None:
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


def _pairs_to_dict(element: list[Any]) -> Any:
    """Return the dict of a list of pairs; any other list unchanged.

    Raises: ValueError for iterable elements that are not pairs.
    """
    try:
        return dict(element)
    except TypeError:
        return element
