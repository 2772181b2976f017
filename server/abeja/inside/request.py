"""Request: the argument of a handler for one call. Source: abejaruntime 1.1.1, its classes of the same names.

The names, and those of their methods, are used by handlers.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

from .multipart import parts_of


class _ReadOnlyMapping(Mapping[str, Any]):
    """An immutable mapping that is equal to a dict of its items, and has the same text."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __str__(self) -> str:
        return str(self._items)

    def __eq__(self, other: object) -> bool:
        return self is other or self._items == other

    __hash__ = None  # type: ignore[assignment]

    def get(self, key: str, default: Any = None) -> Any:
        """Return an item, or `default`."""
        return self._items.get(key, default)

    def keys(self) -> Any:
        """Return the keys."""
        return self._items.keys()

    def items(self) -> Any:
        """Return the keys with the values."""
        return self._items.items()

    def values(self) -> Any:
        """Return the values."""
        return self._items.values()


class Content(_ReadOnlyMapping):
    """One content of a request: its body, which is a binary file, and its description."""

    def __init__(
        self, content_type: str | None, body: bytes, file_name: str | None = None, form_name: str | None = None
    ) -> None:
        super().__init__(
            {
                "content_type": content_type,
                "metadata": None,
                "body": io.BufferedReader(io.BytesIO(body)),
                "file_name": file_name,
                "form_name": form_name,
            }
        )

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes, or all that are left. Raises: ValueError after `close`."""
        content: bytes = self._items["body"].read(size)
        return content

    def close(self) -> None:
        """Close the body."""
        self._items["body"].close()


class HttpHeaders(Mapping[str, Any]):
    """The headers of a request, with case-insensitive names. It iterates over pairs, one for each value."""

    def __init__(self, pairs: tuple[tuple[str, str], ...]) -> None:
        self._pairs = pairs

    def get_all(self, key: str) -> list[str]:
        """Return all values of a header, in order."""
        wanted = key.lower()
        return [value for name, value in self._pairs if name == wanted]

    def __getitem__(self, key: str) -> str | None:
        values = self.get_all(key)
        return values[-1] if values else None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __contains__(self, key: Any) -> bool:
        return self[key] is not None

    has_key = __contains__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HttpHeaders) and set(self._pairs) == set(other._pairs)

    __hash__ = None  # type: ignore[assignment]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the last value of a header, or `default`."""
        value = self[key]
        return default if value is None else value

    def keys(self) -> Any:
        """Return the name for each value."""
        return (name for name, _ in self._pairs)

    def values(self) -> Any:
        """Return all values."""
        return (value for _, value in self._pairs)

    def items(self) -> Any:
        """Return names and values."""
        return (pair for pair in self._pairs)


class Request(_ReadOnlyMapping):
    """One request: a mapping, and a readable file, which is its first content."""

    def __getitem__(self, key: str) -> Any:
        return self._first()["metadata"] if key == "metadata" else self._items[key]

    def append_content(self, content: Content) -> None:
        """Add a content."""
        self._items["contents"].append(content)

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes of the first content, or all that are left. Raises: ValueError if there is none."""
        content: bytes = self._first().read(size)
        return content

    def close(self) -> None:
        """Close all contents."""
        for content in self._items["contents"]:
            content.close()

    def _first(self) -> Any:
        contents = self._items["contents"]
        if not contents:
            raise ValueError("the request has no content")
        return contents[0]


class RequestHead:
    """The content of a head. Cached by its bytes: nothing in it is an object that a handler could modify."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._method = head["method"]
        self._type = head["type"]
        self._boundary = head["boundary"]
        self._headers = tuple((name, tuple(values)) for name, values in head["headers"])
        self._pairs = tuple((name, value) for name, values in self._headers for value in values)

    def request(self, body: bytes) -> Request:
        """Make the request of a call with this body. Raises: CallRefusedError for a form that cannot be read."""
        if self._boundary is None:
            contents = [Content(None, body)]
        else:
            parts = parts_of(body, self._boundary.encode("latin-1"))
            contents = [Content(part.content_type, part.content, part.file_name, part.form_name) for part in parts]
        return Request(
            {
                "http_method": self._method,
                "content_type": self._type,
                "headers": [{"key": name, "values": list(values)} for name, values in self._headers],
                "http_headers": HttpHeaders(self._pairs),
                "contents": contents,
            }
        )
