"""UploadedFile: a file that a client sent, as models receive it. Source: deepaas 2.6.0, model/v2/wrapper.py."""

from __future__ import annotations

from typing import NamedTuple


class UploadedFile(NamedTuple):
    """A file. `filename` is its path until the call, or the training, has ended.

    `name` is the argument's; `content_type` and `original_filename` are as the client sent them.
    """

    name: str | None = None
    filename: str | None = None
    content_type: str | None = None
    original_filename: str | None = None


class ReturnedFile(NamedTuple):
    """The original's form for a file that a model returns; here such files are sent unchanged."""

    name: str | None = None
    filename: str | None = None
    content_type: str | None = None
    original_filename: str | None = None
