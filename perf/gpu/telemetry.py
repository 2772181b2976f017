"""Telemetry: the metrics page compared with nvidia-smi while a model is busy, and the doctor's report."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.perf.generator.orders import Load

from .context import CheckContext
from .models import FP16
from .rows import Row, failed
from .server_driver import TRANSPORTS, config_of, driving, serving

ENERGY, POWER = "nv_energy_consumption", "nv_gpu_power_usage"
OF_MODELS, REST = "penstock_energy_joules_total", "penstock_energy_rest_joules_total"
DEVICE_TIME = "penstock_device_seconds_total"
_QUERY_TIMEOUT_S = 15.0
_LINE = re.compile(r"^(\w+)(?:\{([^}]*)\})? (\S+)$")


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure: its names on the page and in nvidia-smi. `scale`: the factor for nvidia-smi's value.

    `share` and `least`: the allowed difference, relative, and absolute in the page's unit.
    """

    metric: str
    query: str
    scale: float
    share: float
    least: float

    def near(self, page: float, asked: float) -> bool:
        """Return whether both values are about the same."""
        return abs(page - asked * self.scale) <= max(self.share * abs(asked * self.scale), self.least)


_MIB = 1 << 20
COMPARED = (
    Compared("nv_gpu_utilization", "utilization.gpu", 0.01, 0.0, 0.25),
    Compared("nv_gpu_memory_total_bytes", "memory.total", _MIB, 0.02, 0),
    Compared("nv_gpu_memory_used_bytes", "memory.used", _MIB, 0.02, 256 * _MIB),
    Compared(POWER, "power.draw", 1.0, 0.3, 30.0),
    Compared("penstock_gpu_temperature_celsius", "temperature.gpu", 1.0, 0.0, 4.0),
)


def report(context: CheckContext) -> Iterator[Row]:
    """Yield the page's figures next to nvidia-smi's, and the doctor's findings."""
    try:
        yield from _metrics(context)
    except Exception as error:  # noqa: BLE001 - the doctor is asked all the same
        yield failed("telemetry", "metrics", error)
    yield from _doctor(context)


def _metrics(context: CheckContext) -> Iterator[Row]:
    variant = context.variant("encoder", FP16)
    rows = min(context.best_rows(variant), 64)
    words = ("--metrics-interval-ms", "200")
    with serving(context, "telemetry", *words) as server:
        context.file(variant)
        server.control.load(variant.name, config_of(context, variant.name, rows))
        with driving(context, server, variant, TRANSPORTS[0], rows=1, slots=4 * rows) as running:
            running.start_load(Load(concurrency=4 * rows))
            server.process.request("GET", "/metrics")  # NVML may take longer to start than the page waits for it
            running.wait(context.seconds(1.5))
            first, begin = _page(server.process.request("GET", "/metrics")), time.monotonic()
            asked: dict[str, float] = {}
            asking = threading.Thread(target=lambda: asked.update(nvidia_smi() if context.on_gpu else {}))
            asking.start()
            running.wait(context.seconds(1.0))
            second, took_s = _page(server.process.request("GET", "/metrics")), time.monotonic() - begin
            asking.join(_QUERY_TIMEOUT_S)
            running.halt()
    if not context.on_gpu:
        yield Row("telemetry", "metrics of GPUs", "none", note="there is no GPU to tell of")
        return
    for each in COMPARED:
        yield compared(each, second, asked)
    yield energy(first, second, took_s)
    yield shared_out(second)
    busy = (second.get(DEVICE_TIME, math.nan) - first.get(DEVICE_TIME, math.nan)) / took_s
    what = "share of the time that the device ran the model"
    yield Row("telemetry", what, busy, wanted="0.5 to 1", held=0.5 <= busy <= 1.05, note=DEVICE_TIME)


def compared(each: Compared, page: Mapping[str, float], asked: Mapping[str, float]) -> Row:
    """Compare a figure of the page with nvidia-smi's."""
    there, said = page.get(each.metric, math.nan), asked.get(each.query, math.nan)
    wanted = f"{said * each.scale:.4g}" if math.isfinite(said) else "nvidia-smi says nothing"
    value = there if math.isfinite(there) else "not on the page"
    return Row("telemetry", each.metric, value, wanted=wanted, held=each.near(there, said), note=f"beside {each.query}")


def energy(first: Mapping[str, float], second: Mapping[str, float], took_s: float) -> Row:
    """Compare the joules between two pages with the power in that time."""
    joules = second.get(ENERGY, math.nan) - first.get(ENERGY, math.nan)
    wanted = (first.get(POWER, math.nan) + second.get(POWER, math.nan)) / 2 * took_s
    held = abs(joules - wanted) <= 0.4 * wanted
    return Row("telemetry", ENERGY, joules, "J", f"{wanted:.4g}", held, f"in {took_s:.1f} s, beside the power")


def shared_out(page: Mapping[str, float]) -> Row:
    """Compare the energy of the models and of nobody with that of the GPU."""
    models, rest, whole = (page.get(name, math.nan) for name in (OF_MODELS, REST, ENERGY))
    held = abs(models + rest - whole) <= max(0.01 * whole, 1.0)
    note = f"and {rest:.4g} J are nobody's"
    return Row("telemetry", "energy of models", models, "J", f"{whole:.4g} in all", held, note)


def _page(text: bytes) -> dict[str, float]:
    """Parse a metrics page: the sum over all labels of each metric."""
    found: dict[str, float] = {}
    for line in text.decode("utf-8").splitlines():
        match = _LINE.match(line)
        if match is not None:
            try:
                found[match[1]] = found.get(match[1], 0.0) + float(match[3])
            except ValueError:
                continue
    return found


def nvidia_smi() -> dict[str, float]:
    """Query nvidia-smi about the first GPU. Raises: OSError, subprocess.SubprocessError if that is not possible."""
    queries = [each.query for each in COMPARED]
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(queries)}", "--format=csv,noheader,nounits"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_QUERY_TIMEOUT_S)
    return parse_smi(queries, ended.stdout)


def parse_smi(queries: list[str], text: str) -> dict[str, float]:
    """Parse its only line; values that are not numbers ("[N/A]") are omitted."""
    words = (text.strip().splitlines() or [""])[0].split(",")
    found = {}
    for query, word in zip(queries, words, strict=False):
        try:
            found[query] = float(word)
        except ValueError:
            continue
    return found


def _doctor(context: CheckContext) -> Iterator[Row]:
    command = [sys.executable, "-m", "penstock.server.cli", "doctor", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(context.remaining_s(), 1))
    try:
        document = json.loads(ended.stdout)
    except ValueError:
        yield failed("telemetry", "doctor", ended.stderr or ended.stdout or f"status {ended.returncode}")
        return
    errors = errors_of(document)
    note = "; ".join(errors) or f"status {ended.returncode}"
    held = not errors if context.on_gpu else None
    yield Row("telemetry", "what the doctor finds wrong", len(errors), "errors", wanted="0", held=held, note=note[:300])


def errors_of(document: object) -> list[str]:
    """Return the texts of everything that a doctor's JSON calls an error, at any depth."""
    if isinstance(document, list):
        return [text for each in document for text in errors_of(each)]
    if not isinstance(document, dict):
        return []
    if document.get("level") == "error":
        return [str(document.get("text", document))]
    return errors_of(list(document.values()))
