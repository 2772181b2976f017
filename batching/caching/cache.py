"""Cache: cached answers, bounded by bytes, and their keys.

Pure: it has no clock and no thread, and does not know requests. Used by model_cache.py.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import struct
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.backends.backend import Array
from penstock.backends.signature import Signature

ENTRY_BYTES = 512
"""What an entry takes besides its arrays: its key, its slots in two tables that double as they grow, and itself."""
ARRAY_BYTES = 144
"""What an array takes besides its values. tests/batching/test_cache.py checks both against actual memory use."""
_KEY_BYTES = 32
_MAX_HEADS = 256
_MAX_COPY_BYTES = 1024
"""Up to this size, values are copied to be hashed: a copy takes half the time of a view, which is 0.3 us."""
_COUNT = struct.Struct("<Q")
_copied = np.ndarray.copy


class _Entry(NamedTuple):
    outputs: tuple[Array, ...]
    nbytes: int
    owner: set[bytes]


class Cache:
    """The answers of all models of a server, in order of last use.

    Invariant: `used_bytes` never exceeds `size_bytes`; each entry counts with everything it takes.
    Ownership: the cache owns its arrays: answers are copied on insertion and on lookup.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        # keeps clients from knowing which requests would share a key, were blake2b ever broken
        self._secret = secrets.token_bytes(_KEY_BYTES)
        self._loads = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def make_keys(self, name: str, version: str, signature: Signature) -> Keys:
        """Make the keys of one load of one model version; no other load, even of that version, has the same keys."""
        return Keys(self._secret, [name, version, str(next(self._loads))], signature)

    def find(self, key: bytes) -> list[Array] | None:
        """Return a copy of the entry under a key, and make it the last to be evicted."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return list(map(_copied, entry.outputs))

    def insert(self, key: bytes, outputs: Sequence[Any], owner: set[bytes]) -> bool:
        """Insert an answer, evicting the least recently used until it fits. `owner` holds the keys of its model.

        Returns: False if it exceeds an empty cache, or has outputs that are not tensors; nothing is evicted then.
        """
        if not all(isinstance(output, np.ndarray) for output in outputs):
            return False
        nbytes = ENTRY_BYTES + sum(map(array_bytes, outputs))
        if nbytes > self.size_bytes:
            return False
        self._remove(key)
        while self.used_bytes + nbytes > self.size_bytes:
            self._remove(next(iter(self._entries)))
        # a slice would keep the outputs of the whole batch
        self._entries[key] = _Entry(tuple([output.copy() for output in outputs]), nbytes, owner)
        self.used_bytes += nbytes
        owner.add(key)
        return True

    def remove_some(self, owner: set[bytes], limit: int) -> bool:
        """Remove at most `limit` answers of one model. Returns: whether there are more of them."""
        for key in list(itertools.islice(owner, limit)):
            self._remove(key)
        return bool(owner)

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry.nbytes
            entry.owner.discard(key)


def array_bytes(array: Array) -> int:
    """Count the bytes that a copy of an array takes, its strings included."""
    strings = sum(map(sys.getsizeof, array.ravel().tolist())) if array.dtype.hasobject else 0
    return ARRAY_BYTES + array.nbytes + strings


class Keys:
    """The keys of one load of one model version: a keyed hash of everything that its answer depends on.

    Two requests have the same key if and only if they are identical to the last bit: names, datatypes and shapes of the
    inputs, their bytes, and the outputs wanted. Everything of variable length is prefixed with its length.
    Threads: any.
    """

    def __init__(self, secret: bytes, load: Iterable[str], signature: Signature) -> None:
        self._model = hashlib.blake2b(key=secret, digest_size=_KEY_BYTES)
        tensors = [text for spec in signature.inputs for text in (spec.name, spec.datatype)]
        for text in (*load, *tensors):
            _update(self._model, text.encode())
        self._heads: dict[tuple[Any, ...], hashlib.blake2b] = {}

    def key_for(self, inputs: Sequence[Array | None], wanted: tuple[int, ...]) -> bytes:
        """Make the key of a request. Shapes: `inputs` follow the Signature's order, None for one that is absent."""
        head_parts: list[Any] = [wanted]
        values: list[Any] = []
        for array in inputs:
            if array is None:
                head_parts.append(None)
                continue
            head_parts.append(array.shape)
            if array.dtype.hasobject:
                values.append(_strings(array))
            elif array.nbytes <= _MAX_COPY_BYTES:
                values.append(array.tobytes())
            else:
                values.append(array.ravel().data)
        head = tuple(head_parts)
        state = (self._heads.get(head) or self._head(head)).copy()
        for each in values:
            state.update(each)
        return state.digest()

    def _head(self, head: tuple[Any, ...]) -> hashlib.blake2b:
        """Start a key with the shapes, which determine the lengths of the bytes that follow."""
        state = self._model.copy()
        _update(state, repr(head).encode())
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        self._heads[head] = state
        return state


def _strings(array: Array) -> bytes:
    parts: list[bytes] = []
    for element in array.ravel().tolist():
        value = element if type(element) is bytes else str(element).encode()
        parts += (_COUNT.pack(len(value)), value)
    return b"".join(parts)


def _update(state: hashlib.blake2b, text: bytes) -> None:
    state.update(_COUNT.pack(len(text)))
    state.update(text)
