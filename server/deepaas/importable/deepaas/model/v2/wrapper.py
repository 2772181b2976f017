"""UploadedFile: what a model has for a file that a client has sent. Source: deepaas 2.6.0, model/v2/wrapper.py."""

from __future__ import annotations

from typing import NamedTuple


class UploadedFile(NamedTuple):
    """A file. `filename` is the path where it lies until the call, or the training, has ended.

    `name` is the argument's; `content_type` and `original_filename` are as the client has sent them.
    """

    name: str | None = None
    filename: str | None = None
    content_type: str | None = None
    original_filename: str | None = None


class ReturnedFile(NamedTuple):
    """What the original made of a file that a model gives back; such files are given as they are here."""

    name: str | None = None
    filename: str | None = None
    content_type: str | None = None
    original_filename: str | None = None
