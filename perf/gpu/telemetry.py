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
class ComparedMetric:
    """One figure: its names on the page and in nvidia-smi. `scale`: the factor for nvidia-smi's value.

    `share` and `least`: the allowed difference, relative, and absolute in the page's unit.
    """

    metric: str
    query: str
    scale: float
    share: float
    least: float

    def is_close(self, page: float, reference: float) -> bool:
        """Return whether both values are about the same."""
        return abs(page - reference * self.scale) <= max(self.share * abs(reference * self.scale), self.least)


_MIB = 1 << 20
COMPARED_METRICS = (
    ComparedMetric("nv_gpu_utilization", "utilization.gpu", 0.01, 0.0, 0.25),
    ComparedMetric("nv_gpu_memory_total_bytes", "memory.total", _MIB, 0.02, 0),
    ComparedMetric("nv_gpu_memory_used_bytes", "memory.used", _MIB, 0.02, 256 * _MIB),
    ComparedMetric(POWER, "power.draw", 1.0, 0.3, 30.0),
    ComparedMetric("penstock_gpu_temperature_celsius", "temperature.gpu", 1.0, 0.0, 4.0),
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
    options = ("--metrics-interval-ms", "200")
    with serving(context, "telemetry", *options) as server:
        context.file(variant)
        server.control.load(variant.name, config_of(context, variant.name, rows))
        with driving(context, server, variant, TRANSPORTS[0], rows=1, slots=4 * rows) as running:
            running.start_load(Load(concurrency=4 * rows))
            server.process.request("GET", "/metrics")  # NVML may take longer to start than the page waits for it
            running.wait(context.seconds(1.5))
            first_page, begin_s = _parse_page(server.process.request("GET", "/metrics")), time.monotonic()
            smi_values: dict[str, float] = {}
            smi_thread = threading.Thread(target=lambda: smi_values.update(nvidia_smi() if context.on_gpu else {}))
            smi_thread.start()
            running.wait(context.seconds(1.0))
            second_page, took_s = _parse_page(server.process.request("GET", "/metrics")), time.monotonic() - begin_s
            smi_thread.join(_QUERY_TIMEOUT_S)
            running.halt()
    if not context.on_gpu:
        yield Row("telemetry", "metrics of GPUs", "none", note="there is no GPU to tell of")
        return
    for each in COMPARED_METRICS:
        yield compare_with_smi(each, second_page, smi_values)
    yield energy(first_page, second_page, took_s)
    yield energy_shares(second_page)
    busy = (second_page.get(DEVICE_TIME, math.nan) - first_page.get(DEVICE_TIME, math.nan)) / took_s
    label = "share of the time that the device ran the model"
    yield Row("telemetry", label, busy, wanted="0.5 to 1", held=0.5 <= busy <= 1.05, note=DEVICE_TIME)


def compare_with_smi(each: ComparedMetric, page: Mapping[str, float], smi_values: Mapping[str, float]) -> Row:
    """Compare a figure of the page with nvidia-smi's."""
    page_value, smi_value = page.get(each.metric, math.nan), smi_values.get(each.query, math.nan)
    expected_text = f"{smi_value * each.scale:.4g}" if math.isfinite(smi_value) else "nvidia-smi says nothing"
    value = page_value if math.isfinite(page_value) else "not on the page"
    return Row(
        "telemetry",
        each.metric,
        value,
        wanted=expected_text,
        held=each.is_close(page_value, smi_value),
        note=f"beside {each.query}",
    )


def energy(first_page: Mapping[str, float], second_page: Mapping[str, float], took_s: float) -> Row:
    """Compare the joules between two pages with the power in that time."""
    joules = second_page.get(ENERGY, math.nan) - first_page.get(ENERGY, math.nan)
    expected_j = (first_page.get(POWER, math.nan) + second_page.get(POWER, math.nan)) / 2 * took_s
    passed = abs(joules - expected_j) <= 0.4 * expected_j
    return Row("telemetry", ENERGY, joules, "J", f"{expected_j:.4g}", passed, f"in {took_s:.1f} s, beside the power")


def energy_shares(page: Mapping[str, float]) -> Row:
    """Compare the energy of the models and of nobody with that of the GPU."""
    models_j, rest_j, device_j = (page.get(name, math.nan) for name in (OF_MODELS, REST, ENERGY))
    passed = abs(models_j + rest_j - device_j) <= max(0.01 * device_j, 1.0)
    note = f"and {rest_j:.4g} J are nobody's"
    return Row("telemetry", "energy of models", models_j, "J", f"{device_j:.4g} in all", passed, note)


def _parse_page(text: bytes) -> dict[str, float]:
    """Parse a metrics page: the sum over all labels of each metric."""
    totals: dict[str, float] = {}
    for line in text.decode("utf-8").splitlines():
        match = _LINE.match(line)
        if match is not None:
            try:
                totals[match[1]] = totals.get(match[1], 0.0) + float(match[3])
            except ValueError:
                continue
    return totals


def nvidia_smi() -> dict[str, float]:
    """Query nvidia-smi about the first GPU. Raises: OSError, subprocess.SubprocessError if that is not possible."""
    queries = [each.query for each in COMPARED_METRICS]
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(queries)}", "--format=csv,noheader,nounits"]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_QUERY_TIMEOUT_S)
    return parse_smi(queries, completed.stdout)


def parse_smi(queries: list[str], text: str) -> dict[str, float]:
    """Parse its only line; values that are not numbers ("[N/A]") are omitted."""
    fields = (text.strip().splitlines() or [""])[0].split(",")
    values = {}
    for query, field in zip(queries, fields, strict=False):
        try:
            values[query] = float(field)
        except ValueError:
            continue
    return values


def _doctor(context: CheckContext) -> Iterator[Row]:
    command = [sys.executable, "-m", "penstock.server.cli", "doctor", "--json"]
    completed = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=max(context.remaining_s(), 1)
    )
    try:
        document = json.loads(completed.stdout)
    except ValueError:
        yield failed("telemetry", "doctor", completed.stderr or completed.stdout or f"status {completed.returncode}")
        return
    errors = errors_of(document)
    note = "; ".join(errors) or f"status {completed.returncode}"
    passed = not errors if context.on_gpu else None
    yield Row(
        "telemetry", "what the doctor finds wrong", len(errors), "errors", wanted="0", held=passed, note=note[:300]
    )


def errors_of(document: object) -> list[str]:
    """Return the texts of everything that a doctor's JSON calls an error, at any depth."""
    if isinstance(document, list):
        return [text for each in document for text in errors_of(each)]
    if not isinstance(document, dict):
        return []
    if document.get("level") == "error":
        return [str(document.get("text", document))]
    return errors_of(list(document.values()))
