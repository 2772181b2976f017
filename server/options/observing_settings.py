"""ObservingSettings: the part of the settings that is about metrics, tracing, logs and who may ask for what.

Settings has it; the composition root reads it. Names of what Triton has are Triton's.
"""

from __future__ import annotations

from dataclasses import dataclass

from .setting import PORTS, setting


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ObservingSettings:
    """What a server says of its work, and to whom."""

    http_restricted_api: tuple[str, ...] = setting(
        (), "HTTP", "`CATEGORY,...:HEADER=VALUE`: answer these groups of endpoints only to requests with this header. "
        "Repeatable. Categories: health, metadata, inference, shared-memory, model-config, model-repository, "
        "statistics, trace, logging.", unit="RULE",
    )  # fmt: skip

    grpc_restricted_protocol: tuple[str, ...] = setting(
        (), "gRPC", "As --http-restricted-api, for RPCs. The header is `triton-grpc-protocol-` and this name, as "
        "in Triton. Repeatable.", unit="RULE",
    )  # fmt: skip
    grpc_header_forward_pattern: str = setting("", "gRPC", "The same for metadata of calls.", unit="PATTERN")

    allow_metrics: bool = setting(True, "Metrics", "Serve metrics on a port of their own, beside the HTTP port.")
    metrics_address: str = setting(
        "", "Metrics", "Address of the metrics port; empty: that of --http-address.", unit="address"
    )
    metrics_port: int = setting(
        8002, "Metrics", "Port of the metrics; 0 lets the system choose.", unit="TCP port", bounds=PORTS
    )
    metrics_path: str = setting("/metrics", "Metrics", "Path of the metrics on their own port.", unit="path")
    metrics_access_log: bool = setting(True, "Metrics", "Let --access-log have the requests of the metrics port.")
    metrics_interval_ms: int = setting(
        2000, "Metrics", "How old the figures of the machine and its GPUs may be. Read only while somebody scrapes.",
        unit="milliseconds", bounds=(1, 3_600_000),
    )  # fmt: skip
    allow_gpu_metrics: bool = setting(True, "Metrics", "Show the machine's GPUs, through NVML.")
    allow_cpu_metrics: bool = setting(True, "Metrics", "Show the machine's CPU and memory.")
    metrics_config: tuple[str, ...] = setting(
        (), "Metrics", "What else to show: counter_latencies, summary_latencies, histogram_latencies=true or false; "
        "summary_quantiles=0.5:0.05,0.99:0.001. Repeatable; see docs/metrics.md.", unit="RULE",
    )  # fmt: skip

    trace_config: tuple[str, ...] = setting(
        (), "Tracing", "Which requests are traced and where the traces go, such as `level=TIMESTAMPS`, `rate=100` and "
        "`triton,file=trace.json`. Repeatable; see docs/tracing.md.", unit="RULE",
    )  # fmt: skip

    log_file: str = setting(
        "", "Logs", "Append the log to this file, and write nothing of it to stderr. It is opened once, at the start.",
        unit="PATH",
    )  # fmt: skip
    log_format: str = setting(
        "auto", "Logs", "One line of text or one JSON object per event; auto: text on a terminal, JSON otherwise. "
        "Triton's words are known: default is auto, ISO8601 is text.",
        choices=("auto", "text", "json", "default", "ISO8601"),
    )  # fmt: skip
    log_verbose: int = setting(0, "Logs", "1 and above: log debug messages too.", unit="level", bounds=(0, 2**31 - 1))
    log_info: bool = setting(True, "Logs", "Log informational messages.")
    log_warning: bool = setting(True, "Logs", "Log warnings.")
    log_error: bool = setting(True, "Logs", "Log errors.")
    access_log: bool = setting(
        False,
        "Logs",
        "Log every answer, over HTTP and gRPC, with status, duration, bytes, model and request id. Costs throughput.",
    )

    allow_client_shm: bool = setting(
        False, "Shared memory", "Let clients register system and CUDA shared memory, and place tensors there. Whoever "
        "reaches the server can then name any object in /dev/shm that it may open.",
    )  # fmt: skip
