"""A made-up run, as a real one looks: a batching server whose throughput bends while its latency grows."""

from __future__ import annotations

import copy
import functools

import numpy as np

from penstock.perf.reports import histograms
from penstock.perf.reports.document import Client, Document, Level, Model, Offered, Samples, ServerSide

GPU = "GPU-5d1c7f0a-0001"


def client(latencies_us: np.ndarray, seconds: float, errors: dict[str, int] | None = None, batch: int = 1) -> Client:
    """What a generator saw of requests that took so long."""
    requests = len(latencies_us)
    quantiles = {"p50": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99, "p99.9": 99.9}
    return Client(
        requests,
        requests * batch,
        seconds,
        requests / seconds,
        requests * batch / seconds,
        {
            "mean": float(latencies_us.mean()),
            "std": float(latencies_us.std()),
            "min": float(latencies_us.min()),
            "max": float(latencies_us.max()),
            **{name: float(np.percentile(latencies_us, each)) for name, each in quantiles.items()},
        },
        histograms.text((latencies_us * 1e3).astype(np.int64)),
        errors=errors or {},
        cpu_us_per_request=22.4,
        cores=requests / seconds * 22.4e-6,
    )


def level(concurrency: int, seed: int = 0, speed: float = 1.0, server: bool = True, gpu: bool = True) -> Level:
    """One level of a closed loop of a server that runs batches of up to 16 rows in 0.6 ms and 0.11 ms a row."""
    embed_figures = np.random.default_rng(seed + concurrency)
    rows = min(max(concurrency / 2, 1), 16)
    infer = (600 + 110 * rows) / speed
    per_s = min(concurrency / (infer + 260) * 1e6, rows / infer * 1e6 * 0.97)
    mean = concurrency / per_s * 1e6
    seconds = 0.3
    windows = []
    for at in range(5 if concurrency > 4 else 3):
        warm = 1.25 if at == 0 else 1.0
        each = int(per_s / warm * seconds * embed_figures.normal(1, 0.008))
        took = embed_figures.gamma(9, mean * warm / 9, each) * np.where(embed_figures.random(each) < 0.006, 3.2, 1.0)
        windows.append(client(took, seconds))
    settled = embed_figures.gamma(9, mean / 9, int(per_s * 0.9)) * np.where(
        embed_figures.random(int(per_s * 0.9)) < 0.006, 3.2, 1.0
    )
    whole_client = client(settled, 0.9)
    waited = max(whole_client.latency_us["mean"] - infer - 180, 20.0)
    sampled = len(windows) * 2
    samples = Samples([0.5 * (at + 1) for at in range(sampled)])
    busy = min(per_s * infer / rows / 1e6, 0.99)
    if gpu:
        samples.series[f"gpu.{GPU}.utilization"] = _around(embed_figures, busy, sampled, 1.0)
        samples.series[f"gpu.{GPU}.power_w"] = _around(embed_figures, 90 + 240 * busy, sampled)
        samples.series[f"gpu.{GPU}.memory_bytes"] = [6.1e9 + 2e8 * rows] * sampled
        samples.series[f"gpu.{GPU}.memory_total_bytes"] = [80e9] * sampled
    samples.series["cpu.utilization"] = _around(embed_figures, 0.2 + 0.5 * busy, sampled)
    samples.series["server.cores"] = _around(embed_figures, 0.3 + 1.1 * busy, sampled)
    samples.series["server.rss_bytes"] = [8.2e8 + 3e6 * at for at in range(sampled)]
    return Level(
        Offered("concurrency", concurrency),
        True,
        whole_client,
        3,
        windows,
        _side(whole_client, rows, infer, waited) if server else None,
        samples if server else None,
        server_cpu_s_per_1000=0.041 - 0.0006 * rows if server else None,
        server_rss_bytes=8.3e8 if server else None,
        energy_j_per_1000=(90 + 240 * busy) / per_s * 1000 if server and gpu else None,
    )


def _around(
    embed_figures: np.random.Generator, mean: float, count: int, most: float | None = None
) -> list[float | None]:
    return [float(value) for value in np.clip(embed_figures.normal(mean, mean * 0.04, count), 0, most)]


def _side(client: Client, rows: float, infer_us: float, queue_us: float) -> ServerSide:
    executions = int(client.rows / rows)
    row_count = int(rows)
    few, most = int(executions * 0.12), int(executions * 0.7)
    batches = {str(max(row_count // 2, 1)): few, str(max(row_count - 1, 1)): executions - few - most}
    batches[str(row_count)] = batches.get(str(row_count), 0) + most
    return ServerSide(
        client.rows,
        executions,
        client.requests,
        queue_us * 0.86,
        21.0,
        infer_us * 0.9,
        14.0,
        33.0,
        rows,
        batches=batches,
    )


def run(seed: int = 0, speed: float = 1.0, name: str = "resnet50", server: bool = True, gpu: bool = True) -> Document:
    """A whole run of its own: a copy, to be changed at will."""
    return copy.deepcopy(_run(seed, speed, name, server, gpu))


@functools.cache
def _run(seed: int, speed: float, name: str, server: bool, gpu: bool) -> Document:
    """Make a run: seven good levels, one with errors, one that never settled, and one in which the server died."""
    levels = [level(each, seed, speed, server, gpu) for each in (1, 2, 4, 8, 16, 32, 64)]
    few = level(96, seed, speed, server, gpu)
    few.client.errors = {"503 over capacity": few.client.requests // 9}
    loose = level(128, seed, speed, server, gpu)
    loose.stable, loose.ended = False, "unstable"
    died = level(192, seed, speed, server, gpu)
    died.stable, died.ended = False, "the server closed all connections: [Errno 104] Connection reset by peer"
    died.client.errors = {"connection reset by peer": 192}
    return Document(
        Model(
            name,
            "1",
            "onnxruntime_onnx",
            32,
            [{"name": "image", "datatype": "FP32", "shape": [-1, 3, 224, 224]}],
            [{"name": "scores", "datatype": "FP32", "shape": [-1, 1000]}],
            {"max_batch_size": 32, "dynamic_batching": {"max_queue_delay_microseconds": 200}},
            "9f4c1d22b7",
        ),
        [
            "penstock",
            "perf",
            "-m",
            name,
            "-u",
            "gpu-box:8001",
            "-i",
            "grpc",
            "--concurrency-range",
            "1:192",
            "-p",
            "1000",
        ],
        "2026-11-23T04:40:00+00:00",
        "gpu-box:8001",
        "grpc",
        levels=[*levels, few, loose, died],
        server={"name": "penstock", "version": "0.1.0", "extensions": ["statistics"]} if server else {},
        machine={
            "cpu": "AMD EPYC 9654",
            "cores": 16,
            "memory_bytes": 128 * 2**30,
            "os": "Debian GNU/Linux 12",
            "gpus": [{"name": "NVIDIA H200", "uuid": GPU, "driver": "580.65"}],
        },
        versions={"penstock": "0.1.0", "python": "3.11.2", "numpy": "2.4.6", "uvloop": "0.22.1"},
        options={"measurement-interval": 1000, "stability-percentage": 10, "input-data": ["random"]},
        failed="the server closed all connections",
    )
