"""ObservabilitySettings: the settings of metrics, tracing, logs and access restrictions.

Settings inherits them; the composition root reads them. Names are Triton's where it has the setting.
"""

from __future__ import annotations

from dataclasses import dataclass

from .setting import PORTS, setting


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ObservabilitySettings:
    """What a server reports about its work, and to whom."""

    http_restricted_api: tuple[str, ...] = setting(
        (), "HTTP", "`CATEGORY,...:HEADER=VALUE`: serve these groups of endpoints only for requests with this header. "
        "Repeatable. Categories: health, metadata, inference, shared-memory, model-config, model-repository, "
        "statistics, trace, logging.", unit="RULE",
    )  # fmt: skip

    grpc_restricted_protocol: tuple[str, ...] = setting(
        (), "gRPC", "Like --http-restricted-api, for RPCs. The metadata key is the given name prefixed with "
        "`triton-grpc-protocol-`, as in Triton. Repeatable.", unit="RULE",
    )  # fmt: skip
    grpc_header_forward_pattern: str = setting(
        "", "gRPC", "Like --http-header-forward-pattern, for call metadata.", unit="PATTERN"
    )

    allow_metrics: bool = setting(True, "Metrics", "Serve metrics on a separate port, in addition to the HTTP port.")
    metrics_address: str = setting(
        "", "Metrics", "Address of the metrics port. Default: that of --http-address.", unit="address"
    )
    metrics_port: int = setting(
        8002, "Metrics", "Port for metrics; 0 lets the system choose one.", unit="TCP port", bounds=PORTS
    )
    metrics_path: str = setting("/metrics", "Metrics", "Path of the metrics on the metrics port.", unit="path")
    metrics_access_log: bool = setting(True, "Metrics", "Include requests to the metrics port in the access log.")
    metrics_interval_ms: int = setting(
        2000, "Metrics", "Maximum age of the machine and GPU figures. They are read only when metrics are scraped.",
        unit="milliseconds", bounds=(1, 3_600_000),
    )  # fmt: skip
    allow_gpu_metrics: bool = setting(True, "Metrics", "Report the machine's GPUs, read through NVML.")
    allow_cpu_metrics: bool = setting(True, "Metrics", "Report the machine's CPU and memory.")
    metrics_config: tuple[str, ...] = setting(
        (), "Metrics", "Which latency metrics to report: counter_latencies, summary_latencies, "
        "histogram_latencies=true or false; summary_quantiles=0.5:0.05,0.99:0.001. Repeatable; see docs/metrics.md.",
        unit="RULE",
    )  # fmt: skip

    trace_config: tuple[str, ...] = setting(
        (), "Tracing", "Which requests to trace and where to write the traces, such as `level=TIMESTAMPS`, `rate=100` "
        "and `triton,file=trace.json`. Repeatable; see docs/tracing.md.", unit="RULE",
    )  # fmt: skip

    log_file: str = setting(
        "", "Logs", "Append the log to this file instead of writing it to stderr. The file is opened once, at startup.",
        unit="PATH",
    )  # fmt: skip
    log_format: str = setting(
        "auto", "Logs", "One line of text or one JSON object per event. auto: text on a terminal, otherwise JSON. "
        "Triton's values are accepted: default means auto, ISO8601 means text.",
        choices=("auto", "text", "json", "default", "ISO8601"),
    )  # fmt: skip
    log_verbose: int = setting(0, "Logs", "1 or more: also log debug messages.", unit="level", bounds=(0, 2**31 - 1))
    log_info: bool = setting(True, "Logs", "Log informational messages.")
    log_warning: bool = setting(True, "Logs", "Log warnings.")
    log_error: bool = setting(True, "Logs", "Log errors.")
    access_log: bool = setting(
        False, "Logs", "Log every HTTP and gRPC response with its status, duration, bytes, model and request id. "
        "Reduces throughput.",
    )  # fmt: skip

    allow_client_shm: bool = setting(
        False, "Shared memory", "Let clients register system and CUDA shared memory and place tensors in it. Anyone "
        "who can reach the server can then name any object in /dev/shm that the server may open.",
    )  # fmt: skip
