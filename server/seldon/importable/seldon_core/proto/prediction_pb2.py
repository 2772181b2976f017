"""The messages of seldon.protos, in the form of a generated module: from `penstock.server.seldon.protos`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.internal import builder

from penstock.server.seldon.protos import registered_file

DESCRIPTOR = registered_file()
_globals = globals()
builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, _globals)
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, _globals)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
