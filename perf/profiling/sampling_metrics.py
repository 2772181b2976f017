"""The metrics page: a server's metrics of its GPUs and its machine in Prometheus' text format.

Source: prometheus.io/docs/instrumenting/exposition_formats. Invalid lines are skipped: pages have many sources, and one
bad line does not invalidate the others.
"""

from __future__ import annotations

import http.client
import math
import re
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

_LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*+")*+)\})?[ \t]+(\S+)', re.ASCII)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*+)"', re.ASCII)
_ESCAPED = re.compile(r"\\(.)")
_GPU = {
    "nv_gpu_utilization": "utilization",
    "nv_gpu_power_usage": "power_w",
    "nv_gpu_memory_used_bytes": "memory_bytes",
    "nv_gpu_memory_total_bytes": "memory_total_bytes",
    "nv_energy_consumption": "energy_j",
}
_MACHINE = {
    "nv_cpu_utilization": "cpu.utilization",
    "nv_cpu_memory_used_bytes": "memory.used_bytes",
    "nv_cpu_memory_total_bytes": "memory.total_bytes",
}
_NAMES = (*_GPU, *_MACHINE)
TIMEOUT_S = 2.0
_MAX_BYTES = 64 << 20


class MetricsPageError(Exception):
    """The page is not available, or is not a page of metrics."""


def metric_lines(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each line with a number; all other lines are skipped."""
    for line in text.split("\n"):
        match = _LINE.match(line.strip())
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value):
            yield match[1], {name: _unescaped(label) for name, label in _LABEL.findall(match[2] or "")}, value


def _unescaped(label: str) -> str:
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], label)


def parse_page(text: str) -> dict[str, float]:
    """Return a page's values, by the names of the document's Samples. Raises: PageError if it is not a metrics page."""
    known_lines = "\n".join(line for line in text.split("\n") if line.lstrip().startswith(_NAMES))
    values = {}
    for name, labels, value in metric_lines(known_lines):
        if name in _MACHINE:
            values[_MACHINE[name]] = value
        elif name in _GPU and labels.get("gpu_uuid"):
            values[f"gpu.{labels['gpu_uuid']}.{_GPU[name]}"] = value
    if not values and next(metric_lines(text), None) is None:
        raise MetricsPageError("no metrics in it")
    return values


class MetricsPage:
    """A page at a URL, with or without its scheme."""

    def __init__(self, url: str) -> None:
        self.url = url

    def read(self) -> dict[str, float]:
        """Fetch and parse it. Raises: PageError."""
        try:
            parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            with closing(kind(parts.netloc.rpartition("@")[2], timeout=TIMEOUT_S)) as connection:
                path = (parts.path or "/metrics") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", path, headers={"Accept": "text/plain"})
                answer = connection.getresponse()
                content = answer.read(_MAX_BYTES)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise MetricsPageError(f"{self.url}: {str(error) or type(error).__name__}") from error
        if answer.status != http.client.OK:
            raise MetricsPageError(f"{self.url}: {answer.status} {answer.reason}")
        try:
            return parse_page(content.decode("utf-8", "replace"))
        except MetricsPageError as error:
            raise MetricsPageError(f"{self.url}: {error}") from error
