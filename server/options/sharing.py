"""What models share: --rate-limit, --rate-limit-resource, --host-policy and --cache-config.

Parsed with the settings, so an invalid value prevents startup. Source: Triton server, command_line_parser.cc, and
core, numa_utils.cc.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.batching.devices.placement import Devices

    from .model_settings import ModelSettings

MAX_CPUS = 4096
NODES = Path("/sys/devices/system/node")
"""Where Linux lists the CPUs of each NUMA node."""
_LOCAL_CACHE, _MAX_CACHE_BYTES = "local", 1 << 50
_RANGE = "host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got "


def make_devices(settings: ModelSettings) -> Devices:
    """Make what the Engine's models share."""
    # imported here because batching imports numpy, which would slow down the command line
    from penstock.batching.devices.placement import Devices
    from penstock.batching.devices.rate_limiter import RateLimiter

    limited = settings.rate_limit == "execution_count"
    limiter = RateLimiter(parse_resources(settings.rate_limit_resource)) if limited else None
    return Devices(limiter, parse_host_policies(settings.host_policy))


def parse_resources(entries: Iterable[str]) -> dict[tuple[str, int | None], int]:
    """Read the values of --rate-limit-resource.

    Returns: the amount of each resource, by name and device number; the number is None for every device. If a resource
    is given twice, the smaller amount counts, as in Triton. Raises: ValueError.
    """
    amounts: dict[tuple[str, int | None], int] = {}
    for entry in entries:
        name, *numbers = (part.strip() for part in entry.split(":"))
        if not name or len(numbers) not in {1, 2} or not all(_is_number(number) for number in numbers):
            raise ValueError(
                "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
                f"'<resource_name>:<count>'. Got {entry}"
            )
        pool = (name, int(numbers[1]) if len(numbers) > 1 else None)
        amounts[pool] = min(int(numbers[0]), amounts.get(pool, int(numbers[0])))
    return amounts


def parse_host_policies(entries: Iterable[str], nodes: Path = NODES) -> dict[str, frozenset[int]]:
    """Read the values of --host-policy.

    `numa-node` means the CPUs of that node unless `cpu-cores` is given too: memory is allocated on the node of the
    thread that first writes it. Returns: the CPUs of each policy. Raises: ValueError.
    """
    node_policies: dict[str, frozenset[int]] = {}
    policies: dict[str, frozenset[int]] = {}
    for entry in entries:
        name, key, value = _split_rule(entry)
        if not (name and key and value):
            raise ValueError(f"--host-policy option format is '<policy name>,<setting>=<value>'. Got {entry}")
        if key not in {"cpu-cores", "numa-node"}:
            raise ValueError(f"'{entry}': the setting '{key}' is not supported, known: cpu-cores, numa-node")
        if not hasattr(os, "sched_setaffinity"):
            raise ValueError(f"'{entry}': this system cannot bind threads to CPUs")
        if key == "cpu-cores":
            policies[name] = frozenset(_parse_cpus(value))
        else:
            node_policies[name] = _node_cpus(value, nodes)
    return node_policies | policies


def parse_cache(entries: Iterable[str]) -> int:
    """Read the values of --cache-config, `NAME,SETTING=VALUE`, for one cache only.

    Returns: the size of the cache in bytes, 0 for no cache. Raises: ValueError.
    """
    size_bytes = 0
    names: set[str] = set()
    for entry in entries:
        name, key, value = _split_rule(entry)
        if not (name and key and value):
            raise ValueError(f"'{entry}' must have the form {_LOCAL_CACHE},size=BYTES")
        names.add(name)
        if len(names) > 1:
            raise ValueError(
                f"multiple cache configurations ({', '.join(sorted(names))}), but only one cache is supported"
            )
        if name != _LOCAL_CACHE:
            raise ValueError(f"'{entry}': unknown cache '{name}', known: {_LOCAL_CACHE}")
        if key != "size":
            raise ValueError(f"'{entry}': unknown setting '{key}' of cache '{_LOCAL_CACHE}', known: size")
        if size_bytes:
            raise ValueError(f"'{entry}': the size is set twice")
        if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= _MAX_CACHE_BYTES:
            raise ValueError(f"'{entry}': the size must be from 1 to {_MAX_CACHE_BYTES} bytes")
        size_bytes = int(value)
    return size_bytes


def _split_rule(entry: str) -> tuple[str, str, str]:
    """Return the parts of `NAME,SETTING=VALUE`; those that are missing are empty."""
    name, _, setting = entry.partition(",")
    key, _, value = setting.partition("=")
    return name.strip(), key.strip(), value.strip()


def _node_cpus(value: str, nodes: Path) -> frozenset[int]:
    """Return the CPUs of a NUMA node. A node with memory only has none, which sets no bound."""
    try:
        cpu_list = (nodes / f"node{int(value)}" / "cpulist").read_text("ascii") if _is_number(value) else None
    except OSError:
        cpu_list = None
    if cpu_list is None:
        raise ValueError(f"the NUMA node '{value}' does not exist in {nodes}")
    parts = [part if "-" in part else f"{part}-{part}" for part in cpu_list.strip().split(",") if part]
    return frozenset(_parse_cpus(",".join(parts))) if parts else frozenset()


def _parse_cpus(value: str) -> Iterable[int]:
    for part in value.split(","):
        low, dash, high = (bound.strip() for bound in part.partition("-"))
        if not dash or not _is_number(low) or not _is_number(high) or not int(low) <= int(high) < MAX_CPUS:
            raise ValueError(f"{_RANGE}{part}")
        yield from range(int(low), int(high) + 1)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) < 1 << 31
