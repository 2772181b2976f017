"""--cache-config: the size of the response cache. Parsed with the settings, so an invalid value prevents startup.

Source: Triton server, command_line_parser.cc: `NAME,SETTING=VALUE`, for one cache only.
"""

from __future__ import annotations

from collections.abc import Iterable

LOCAL = "local"
MIN_BYTES, MAX_BYTES = 1, 1 << 50


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
            raise ValueError(f"'{entry}' must have the form {LOCAL},size=BYTES")
        names.add(name)
        if len(names) > 1:
            raise ValueError(
                f"multiple cache configurations ({', '.join(sorted(names))}), but only one cache is supported"
            )
        if name != LOCAL:
            raise ValueError(f"'{entry}': unknown cache '{name}', known: {LOCAL}")
        if key != "size":
            raise ValueError(f"'{entry}': unknown setting '{key}' of cache '{LOCAL}', known: size")
        if size_bytes:
            raise ValueError(f"'{entry}': the size is set twice")
        if not value.isascii() or not value.isdigit() or not MIN_BYTES <= int(value) <= MAX_BYTES:
            raise ValueError(f"'{entry}': the size must be from {MIN_BYTES} to {MAX_BYTES} bytes")
        size_bytes = int(value)
    return size_bytes
