"""CallRefusedError: why a call is not answered by its handler. Raised and handled inside the worker."""

from __future__ import annotations

from penstock.server.abeja.messages import JSON, status_body
from penstock.server.carrying.messages import pack_answer


class CallRefusedError(Exception):
    """Answered with `status`, and `text` as the reason."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def pack_refusal(status: int, text: str) -> bytes:
    """Encode such an answer."""
    return pack_answer(status, JSON, status_body(text))
