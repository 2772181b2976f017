"""Foreign flags: flags of Triton that Penstock does not have, each with the reason or a replacement. Called by the CLI.

A flag that would change answers is an error that names the flag and the reason. A flag that only sizes or locates
something that does not exist here is accepted with a warning. A flag with two names in Triton has both here; the rest
of the code uses the newer one.
Source: Triton server, command_line_parser.cc.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from .setting import FALSE_WORDS, TRUE_WORDS

_NO_POOL = "there is no such pool: an event loop answers all calls"
_NO_LIBRARIES = "there are no libraries to load: backends are part of Penstock"
_VALUE_OPTIONAL = ("--enable-peer-access",)
"""Boolean flags, which may be given without a value."""

UNSUPPORTED_FLAGS: Mapping[str, str] = MappingProxyType({
    "--model-namespacing": "a model's name must be unique among all repositories",
})  # fmt: skip
UNSUPPORTED_BOOLEANS = ("--model-namespacing",)
"""Those of them that may be given as off."""
IGNORED_FLAGS: Mapping[str, str] = MappingProxyType({
    "--enable-peer-access": "every instance uses its own GPU and never reads the memory of another",
    "--http-thread-count": "HTTP is served by one event loop",
    "--grpc-infer-thread-count": _NO_POOL,
    "--grpc-infer-allocation-pool-size": _NO_POOL,
    "--grpc-max-response-pool-size": _NO_POOL,
    "--backend-directory": _NO_LIBRARIES,
    "--repoagent-directory": "there are no repository agents",
    "--cache-directory": _NO_LIBRARIES,
    "--pinned-memory-pool-byte-size": "there is no pool: each instance allocates its own pinned buffers",
    "--cuda-memory-pool-byte-size": "there is no pool: the runtime manages GPU memory",
    "--cuda-virtual-address-size": "there is no pool: the runtime manages GPU memory",
    "--buffer-manager-thread-count": "each instance gathers tensors on its own thread",
})  # fmt: skip
"""Flags that change no answer, so the server starts with them."""
_CACHE_BYTES = "--response-cache-byte-size"
DEPRECATED_FLAGS: Mapping[str, str] = MappingProxyType({
    _CACHE_BYTES: "--cache-config=local,size={}",
    "--trace-file": "--trace-config=triton,file={}",
    "--trace-level": "--trace-config=level={}",
    "--trace-rate": "--trace-config=rate={}",
    "--trace-count": "--trace-config=count={}",
    "--trace-log-frequency": "--trace-config=triton,log-frequency={}",
})  # fmt: skip
"""Flags that Triton accepts as deprecated, and their replacements."""


OLD_NAMES: Mapping[str, str] = MappingProxyType({
    "--model-store": "--model-repository",
    "--strict-model-config": "--disable-auto-complete-config",
})  # fmt: skip


def rename_flag(argument: str) -> str:
    """Return an argument with the older name of its flag replaced by the newer one."""
    flag, equals, value = argument.partition("=")
    return OLD_NAMES.get(flag, flag) + equals + value


def complete_flag(argument: str, known_flags: Iterable[str]) -> str:
    """Return an argument with its flag completed, if it is a prefix of exactly one known flag.

    Source: Triton server, command_line_parser.cc: getopt_long takes `--model-repo` for `--model-repository`.
    """
    flag, equals, value = argument.partition("=")
    all_flags = {*known_flags, *UNSUPPORTED_FLAGS, *IGNORED_FLAGS, *OLD_NAMES, *DEPRECATED_FLAGS}
    matches = (
        [flag]
        if flag in all_flags
        else [candidate for candidate in all_flags if flag[2:] and candidate.startswith(flag)]
    )
    return matches[0] + equals + value if len(matches) == 1 else argument


def translate_flags(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """Remove flags without effect and their values from a command line, and replace deprecated flags.

    Returns: the resulting words, and the warnings.
    """
    result: list[str] = []
    replacements: list[str] = []
    warnings: list[str] = []
    remaining = deque(arguments)
    while remaining:
        argument = remaining.popleft()
        flag, equals, value = argument.partition("=")
        has_next_value = not equals and bool(remaining) and not remaining[0].startswith("--")
        if flag in IGNORED_FLAGS:
            if has_next_value and (flag not in _VALUE_OPTIONAL or remaining[0].lower() in TRUE_WORDS + FALSE_WORDS):
                remaining.popleft()
            warnings.append(f"{flag} has no effect: {IGNORED_FLAGS[flag]}")
        elif flag in DEPRECATED_FLAGS and (equals or has_next_value):
            replacement = DEPRECATED_FLAGS[flag].format(remaining.popleft() if has_next_value else value)
            if (flag, replacement[-2:]) != (_CACHE_BYTES, "=0"):  # 0 means no cache in Triton
                replacements.append(replacement)
                warnings.append(f"{flag} is deprecated in Triton and treated as {replacement}: use that instead")
        elif flag in UNSUPPORTED_BOOLEANS and (remaining[0] if has_next_value else value).lower() in FALSE_WORDS:
            if has_next_value:
                remaining.popleft()
        else:
            result.append(argument)
    # placed before the newer form, which takes precedence if both are given
    insert_at = next((position for position, argument in enumerate(result) if argument.startswith("--")), len(result))
    return result[:insert_at] + _only_off(replacements) + result[insert_at:], warnings


def _only_off(replacements: list[str]) -> list[str]:
    """Drop the other levels if one is OFF: tracing is then off in Triton, and here OFF must stand alone."""
    level = DEPRECATED_FLAGS["--trace-level"].format("")
    off_flags = [each for each in replacements if each.lower() == f"{level}off"]
    return [each for each in replacements if not each.startswith(level)] + off_flags[:1] if off_flags else replacements


def unsupported_reason(argument: str) -> str | None:
    """Say why a flag of Triton is not accepted, or what value it lacks. None for other arguments."""
    flag = argument.partition("=")[0]
    if flag in DEPRECATED_FLAGS:
        return f"{flag} needs a value, as in {DEPRECATED_FLAGS[flag].format('VALUE')}"
    return (
        f"{flag} is a Triton flag that Penstock does not support: {UNSUPPORTED_FLAGS[flag]}"
        if flag in UNSUPPORTED_FLAGS
        else None
    )
