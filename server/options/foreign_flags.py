"""Foreign flags: those that Triton has and Penstock does not, each with the reason or what to use. Called by the CLI.

Whoever comes with a command line of Triton's is told which word must go, and why. What Triton calls by two names has
both here, too, and is called by the newer one everywhere else.
Source: Triton server, command_line_parser.cc.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TRACE = "deprecated in Triton: use --trace-config"
_NO_POOL = "there is no such pool: calls are answered on one event loop"
_NO_LIBRARIES = "there are no libraries to load: backends are part of Penstock"

FOREIGN: Mapping[str, str] = MappingProxyType({
    "--model-namespacing": "a model's name must be unique among all repositories",
    "--enable-peer-access": "every instance keeps to its own GPU, so none reads another's memory",
    "--http-thread-count": "HTTP is served on one event loop",
    "--reuse-http-port": "a port is one server's; put a load balancer before several",
    "--reuse-grpc-port": "a port is one server's; put a load balancer before several",
    "--grpc-infer-thread-count": _NO_POOL,
    "--grpc-infer-allocation-pool-size": _NO_POOL,
    "--grpc-max-response-pool-size": _NO_POOL,
    "--trace-file": _TRACE,
    "--trace-level": _TRACE,
    "--trace-rate": _TRACE,
    "--trace-count": _TRACE,
    "--trace-log-frequency": _TRACE,
    "--log-file": "logs go to stderr: redirect it",
    "--backend-directory": _NO_LIBRARIES,
    "--repoagent-directory": "there are no repository agents",
    "--cache-directory": _NO_LIBRARIES,
    "--response-cache-byte-size": "deprecated in Triton: use --cache-config local,size=BYTES",
    "--pinned-memory-pool-byte-size": "pinned memory belongs to each instance's buffers: there is no pool",
    "--cuda-memory-pool-byte-size": "GPU memory is the runtime's: there is no pool",
    "--cuda-virtual-address-size": "GPU memory is the runtime's: there is no pool",
    "--buffer-manager-thread-count": "tensors are gathered by each instance's own thread",
})  # fmt: skip


OLDER_NAMES: Mapping[str, str] = MappingProxyType({
    "--model-store": "--model-repository",
    "--strict-model-config": "--disable-auto-complete-config",
})  # fmt: skip


def renamed(word: str) -> str:
    """Give an argument with the newer name of its flag, where it is an older one."""
    flag, equals, value = word.partition("=")
    return OLDER_NAMES.get(flag, flag) + equals + value


def foreign(word: str) -> str | None:
    """Say of an argument that is a flag of Triton's why it is none here; None of others."""
    flag = word.partition("=")[0]
    return f"{flag} is a flag of Triton's that Penstock does not have: {FOREIGN[flag]}" if flag in FOREIGN else None
