"""Answers: the bytes before a body, kept between answers because they change once a second at most."""

from __future__ import annotations

from http import HTTPStatus

Fields = list[tuple[bytes, bytes]]


class Answers:
    """Status lines and default header fields of one server.

    uvicorn keeps the default fields (the date, for one) in a list that it replaces every second; what is made from it
    here is made again when the list is another one. `loud`: reason phrases are in capitals, as WSGI servers of
    Werkzeug's applications send them, and some clients quote them.
    """

    def __init__(self, *, loud: bool = False) -> None:
        self._loud = loud
        self._fields: Fields | None = None
        self._heads: dict[int, bytes] = {}
        self._ok_json = b""

    def ok_json(self, fields: Fields) -> bytes:
        """Give a 200 answer with a JSON body, up to the body; its length goes in with `%`."""
        if fields is not self._fields:
            self._renew(fields)
        return self._ok_json

    def head(self, status: int, fields: Fields) -> bytes:
        """Give the status line and the default fields, each line ended."""
        if fields is not self._fields:
            self._renew(fields)
        lines = self._heads.get(status)
        if lines is None:
            try:
                phrase = HTTPStatus(status).phrase
            except ValueError:
                phrase = ""
            phrase = phrase.upper() if self._loud else phrase
            lines = b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())
            lines += b"".join(b"%b: %b\r\n" % field for field in fields)
            self._heads[status] = lines
        return lines

    def _renew(self, fields: Fields) -> None:
        self._fields = fields
        self._heads.clear()
        escaped = self.head(200, fields).replace(b"%", b"%%")
        self._ok_json = escaped + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
