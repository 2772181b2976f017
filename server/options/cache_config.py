"""--cache-config: the size of the response cache. Parsed with the settings, so an invalid value prevents startup.

Source: Triton server, command_line_parser.cc: `NAME,SETTING=VALUE`, for one cache only.
"""

from __future__ import annotations

from collections.abc import Iterable

LOCAL = "local"
LEAST_BYTES, MOST_BYTES = 1, 1 << 50


def parse(entries: Iterable[str]) -> int:
    """Read the values of --cache-config. Returns: the size of the cache in bytes, 0 for no cache.

    Raises: ValueError.
    """
    size_bytes = 0
    names: set[str] = set()
    for entry in entries:
        name, comma, setting = (part.strip() for part in entry.partition(","))
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not (name and comma and key and equals and value):
            raise ValueError(f"got '{entry}', wanted {LOCAL},size=BYTES")
        names.add(name)
        if len(names) > 1:
            raise ValueError(f"multiple cache configurations ({', '.join(sorted(names))}): there is one cache")
        if name != LOCAL:
            raise ValueError(f"got '{entry}': there is no cache '{name}', known: {LOCAL}")
        if key != "size":
            raise ValueError(f"got '{entry}': the cache '{LOCAL}' has no '{key}', known: size")
        if size_bytes:
            raise ValueError(f"got '{entry}', and a size before")
        if not value.isascii() or not value.isdigit() or not LEAST_BYTES <= int(value) <= MOST_BYTES:
            raise ValueError(f"got '{entry}', wanted a size from {LEAST_BYTES} to {MOST_BYTES}")
        size_bytes = int(value)
    return size_bytes
