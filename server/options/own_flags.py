"""Own flags: Penstock's own flags on another program's command line. Called by the dialects' commands."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from penstock.server.cli import add_flag, with_boolean_values
from penstock.server.settings import known_settings

_NONE: Mapping[str, str] = MappingProxyType({})


def parse_own_flags(
    prog: str, arguments: Sequence[str], reserved: Collection[str], aliases: Mapping[str, str] = _NONE
) -> tuple[dict[str, Any], list[str]]:
    """Take the flags of `penstock serve` out of a command line. `reserved` are flags with another meaning there.

    `aliases` maps other names to our flags. Returns: the values by setting, and the remaining words.
    Raises: SystemExit (2) for a flag without its value.
    """
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=argparse.SUPPRESS)
    for item in known_settings():
        if item.flag not in reserved:
            add_flag(parser, item)
    renamed = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        renamed.append(aliases.get(flag, flag) + equals + value)
    parsed, remaining = parser.parse_known_args(with_boolean_values(renamed))
    return vars(parsed), remaining
