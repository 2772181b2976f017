"""Foreign flags: those that Triton has and Penstock does not, each with the reason or what to use. Called by the CLI.

Whoever comes with a command line of Triton's is told which word must go, and why; a word that only says how large what
is not here should be, or where it is, may stay, with a warning. What Triton calls by two names has both here, too, and
is called by the newer one everywhere else.
Source: Triton server, command_line_parser.cc.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from .setting import FALSE_WORDS, TRUE_WORDS

_NO_POOL = "there is no such pool: an event loop answers all calls"
_NO_LIBRARIES = "there are no libraries to load: backends are part of Penstock"
_BARE = ("--enable-peer-access",)
"""Those that are true or false, as flags of Penstock's are, which may stand alone."""

FOREIGN: Mapping[str, str] = MappingProxyType({
    "--model-namespacing": "a model's name must be unique among all repositories",
})  # fmt: skip
SWITCHES = ("--model-namespacing",)
"""Those of them that may be said to be off, which they are."""
WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType({
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
"""Those that change no answer: to have them said is no reason not to serve."""
_CACHE_BYTES = "--response-cache-byte-size"
OLDER_WAYS: Mapping[str, str] = MappingProxyType({
    _CACHE_BYTES: "--cache-config=local,size={}",
    "--trace-file": "--trace-config=triton,file={}",
    "--trace-level": "--trace-config=level={}",
    "--trace-rate": "--trace-config=rate={}",
    "--trace-count": "--trace-config=count={}",
    "--trace-log-frequency": "--trace-config=triton,log-frequency={}",
})  # fmt: skip
"""What Triton takes with a warning for what is said otherwise by now, and how that is said."""


OLDER_NAMES: Mapping[str, str] = MappingProxyType({
    "--model-store": "--model-repository",
    "--strict-model-config": "--disable-auto-complete-config",
})  # fmt: skip


def renamed(word: str) -> str:
    """Give an argument with the newer name of its flag, where it is an older one."""
    flag, equals, value = word.partition("=")
    return OLDER_NAMES.get(flag, flag) + equals + value


def lengthened(word: str, known: Iterable[str]) -> str:
    """Give an argument with the whole name of its flag, where it is the beginning of one known flag only.

    Source: Triton server, command_line_parser.cc: getopt_long, to which `--model-repo` is `--model-repository`.
    """
    flag, equals, value = word.partition("=")
    every = {*known, *FOREIGN, *WITHOUT_EFFECT, *OLDER_NAMES, *OLDER_WAYS}
    found = [flag] if flag in every else [each for each in every if flag[2:] and each.startswith(flag)]
    return found[0] + equals + value if len(found) == 1 else word


def sifted(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Take what has no effect out of a command line, each with its value, and say newly what is said in an older way.

    Returns: the others, and what to say.
    """
    kept: list[str] = []
    older: list[str] = []
    said: list[str] = []
    left = deque(words)
    while left:
        word = left.popleft()
        flag, equals, value = word.partition("=")
        follows = not equals and bool(left) and not left[0].startswith("--")
        if flag in WITHOUT_EFFECT:
            if follows and (flag not in _BARE or left[0].lower() in TRUE_WORDS + FALSE_WORDS):
                left.popleft()
            said.append(f"{flag} has no effect: {WITHOUT_EFFECT[flag]}")
        elif flag in OLDER_WAYS and (equals or follows):
            newer = OLDER_WAYS[flag].format(left.popleft() if follows else value)
            if (flag, newer[-2:]) != (_CACHE_BYTES, "=0"):  # there it is no cache
                older.append(newer)
                said.append(f"{flag} is deprecated in Triton and treated as {newer}: use that instead")
        elif flag in SWITCHES and (left[0] if follows else value).lower() in FALSE_WORDS:
            if follows:
                left.popleft()
        else:
            kept.append(word)
    # before the newer, which counts where both are said
    at = next((place for place, word in enumerate(kept) if word.startswith("--")), len(kept))
    return kept[:at] + _off(older) + kept[at:], said


def _off(older: list[str]) -> list[str]:
    """Leave out the other levels where one is OFF, which here stands alone; in Triton it is off then."""
    level = OLDER_WAYS["--trace-level"].format("")
    off = [each for each in older if each.lower() == f"{level}off"]
    return [each for each in older if not each.startswith(level)] + off[:1] if off else older


def foreign(word: str) -> str | None:
    """Say of an argument that is a flag of Triton's why it is none here, or what it lacks; None of others."""
    flag = word.partition("=")[0]
    if flag in OLDER_WAYS:
        return f"{flag} needs a value, as in {OLDER_WAYS[flag].format('VALUE')}"
    return f"{flag} is a Triton flag that Penstock does not support: {FOREIGN[flag]}" if flag in FOREIGN else None
