"""ResponseHeads: the bytes before a body, cached because they change at most once a second."""

from __future__ import annotations

from http import HTTPStatus

Fields = list[tuple[bytes, bytes]]
_MAX_CACHED_SIZES = 1024


class ResponseHeads:
    """Status lines and default header fields of one server.

    uvicorn keeps the default fields (such as the date) in a list that it replaces every second; the cache is cleared
    when that list is replaced. A model's answers have few sizes, so the complete head is cached per size: formatting
    the length again takes twice as long. `uppercase`: reason phrases are in capitals, as WSGI servers of Werkzeug
    applications send them, since some clients quote them.
    """

    def __init__(self, *, uppercase: bool = False) -> None:
        self._uppercase = uppercase
        self._fields: Fields | None = None
        self._heads: dict[int, bytes] = {}
        self._ok_heads: dict[int | tuple[int, int], bytes] = {}

    def ok(self, fields: Fields, size: int, json_bytes: int = 0) -> bytes:
        """Return the head of a 200 answer with a body of `size`: JSON, or `json_bytes` of JSON followed by tensors."""
        if fields is not self._fields:
            self._reset(fields)
        key = (size, json_bytes) if json_bytes else size
        return self._ok_heads.get(key) or self._build_ok(key, fields, size, json_bytes)

    def head(self, status: int, fields: Fields) -> bytes:
        """Return the status line and the default fields, with line ends."""
        if fields is not self._fields:
            self._reset(fields)
        lines = self._heads.get(status)
        if lines is None:
            try:
                phrase = HTTPStatus(status).phrase
            except ValueError:
                phrase = ""
            phrase = phrase.upper() if self._uppercase else phrase
            lines = b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())
            lines += b"".join(b"%b: %b\r\n" % field for field in fields)
            self._heads[status] = lines
        return lines

    def _reset(self, fields: Fields) -> None:
        self._fields = fields
        self._heads.clear()
        self._ok_heads.clear()

    def _build_ok(self, key: int | tuple[int, int], fields: Fields, size: int, json_bytes: int) -> bytes:
        lines = self.head(200, fields)
        if json_bytes:
            lines += b"inference-header-content-length: %d\r\ncontent-type: application/octet-stream\r\n" % json_bytes
        else:
            lines += b"content-type: application/json\r\n"
        if len(self._ok_heads) >= _MAX_CACHED_SIZES:
            self._ok_heads.clear()
        lines = self._ok_heads[key] = lines + b"content-length: %d\r\n\r\n" % size
        return lines
