"""Families: every metric, in the order of the page. Read by metrics.py; docs/metrics.md has a row for each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name, Prometheus type and help line."""

    name: str
    kind: str
    text: str


# Names, labels and meanings of nv_* are Triton's (core, metrics.cc); penstock_* and process_* are Penstock's.
FAMILIES: tuple[Family, ...] = (
    Family("nv_inference_request_success", "counter", "Number of successful inference requests, all batch sizes"),
    Family("nv_inference_request_failure", "counter", "Number of failed inference requests, by reason"),
    Family("nv_inference_count", "counter", "Number of inferences performed: rows, at least one per request"),
    Family("nv_inference_exec_count", "counter", "Number of model executions performed: batches"),
    Family("nv_inference_request_duration_us", "counter", "Summed duration of successful requests, in microseconds"),
    Family("nv_inference_queue_duration_us", "counter", "Summed time requests waited for a batch, in microseconds"),
    Family("nv_inference_compute_input_duration_us", "counter", "Summed time of gathering inputs, in microseconds"),
    Family("nv_inference_compute_infer_duration_us", "counter", "Summed time of running the model, in microseconds"),
    Family("nv_inference_compute_output_duration_us", "counter", "Summed time of scattering outputs, in microseconds"),
    Family("nv_inference_request_summary_us", "summary", "Duration of a successful request, in microseconds"),
    Family("nv_inference_queue_summary_us", "summary", "Time a request waited for a batch, in microseconds"),
    Family("nv_inference_compute_input_summary_us", "summary", "Time of gathering inputs, in microseconds"),
    Family("nv_inference_compute_infer_summary_us", "summary", "Time of running the model, in microseconds"),
    Family("nv_inference_compute_output_summary_us", "summary", "Time of scattering outputs, in microseconds"),
    Family("nv_cache_num_hits_per_model", "counter", "Number of requests answered from the response cache"),
    Family("nv_cache_num_misses_per_model", "counter", "Number of requests that were not in the response cache"),
    Family(
        "nv_cache_hit_duration_per_model", "counter", "Summed time of lookups that found an answer, in microseconds"
    ),
    Family(
        "nv_cache_miss_duration_per_model",
        "counter",
        "Summed time of lookups that found none and of the insertions that followed, in microseconds",
    ),
    Family("nv_cache_hit_summary_us", "summary", "Time of a lookup that found an answer, in microseconds"),
    Family(
        "nv_cache_miss_summary_us", "summary", "Time of a lookup that found none and of the insertion, in microseconds"
    ),
    Family("nv_inference_first_response_histogram_ms", "histogram", "Time to the first response, in milliseconds"),
    Family("nv_inference_pending_request_count", "gauge", "Number of requests waiting for a batch"),
    Family("nv_model_load_duration_secs", "gauge", "Time the model took to load, in seconds"),
    Family("penstock_model_ready", "gauge", "Whether a model version that should be served is ready"),
    Family("penstock_queue_seconds", "histogram", "Time a successful request waited for its batch"),
    Family("penstock_compute_seconds", "histogram", "Time a batch took: gather, run and scatter"),
    Family("penstock_total_seconds", "histogram", "Time of a successful request, from acceptance to delivery"),
    Family("penstock_batch_rows", "histogram", "Rows per batch"),
    Family("penstock_hook_seconds", "histogram", "Time of one call of the model's pre or post hook"),
    Family("penstock_waiting_rows", "gauge", "Rows waiting for a batch"),
    Family("penstock_inflight_requests", "gauge", "Requests accepted and not yet delivered"),
    Family("penstock_batch_retries_total", "counter", "Repeated runs with part of a batch that failed"),
    Family("penstock_quarantined_requests_total", "counter", "Requests run separately because they had failed before"),
    Family("penstock_runs_stopped_total", "counter", "Runs ended because they took longer than their limit"),
    Family("penstock_out_of_memory_total", "counter", "Runs for which the device had too little memory"),
    Family("penstock_instances_replaced_total", "counter", "Instances re-created because their device was lost"),
    Family("penstock_late_refusals_total", "counter", "Requests rejected because they would have been answered late"),
    Family("penstock_padded_rows_total", "counter", "Rows added to batches to reach an allowed size"),
    Family(
        "penstock_padding_elements_total", "counter", "Elements of padded inputs, by whether they are data or padding"
    ),
    Family("penstock_workers_started_total", "counter", "Worker processes started for the model's user code"),
    Family("penstock_workers_ended_total", "counter", "Worker processes that ended without being stopped, by reason"),
    Family("penstock_run_seconds", "gauge", "Predicted run time of a batch, learned from past runs"),
    Family("penstock_device_seconds_total", "counter", "Time for which devices other than the CPU ran the model"),
    Family("penstock_energy_joules_total", "counter", "Energy of a GPU, divided among models by the time it ran each"),
    Family("penstock_model_cpu_fallback", "gauge", "Models that run on the CPU because no GPU can run them"),
    Family("penstock_connections", "gauge", "Open HTTP connections"),
    Family("penstock_grpc_connections", "gauge", "Open gRPC connections"),
    Family("penstock_connections_refused_total", "counter", "Connections that were refused, by protocol and reason"),
    Family("penstock_errors_total", "counter", "Error responses, by protocol and code"),
    Family("penstock_processes", "gauge", "Processes of a server that has several, by role"),
    Family(
        "penstock_process_restarts_total", "counter", "Processes that ended unexpectedly and were restarted, by role"
    ),
    Family("cortex_status_code_total", "counter", "Answers to predictions of a Cortex API, by class of status code"),
    Family("cortex_latency_ms", "histogram", "Time from a request to its answer, of a Cortex API, in milliseconds"),
    Family("cortex_prediction_total", "counter", "Predictions of a Cortex API with a classification tracker, by class"),
    Family("cortex_prediction_value", "summary", "Values that a Cortex API with a regression tracker has predicted"),
    Family("cortex_prediction_value_min", "gauge", "The least value that a Cortex API has predicted"),
    Family("cortex_prediction_value_max", "gauge", "The greatest value that a Cortex API has predicted"),
    Family("penstock_chaos_faults_total", "counter", "Injected faults; present only with --chaos"),
    Family("penstock_build_info", "gauge", "Versions of Penstock, Python and ONNX Runtime"),
    Family("process_cpu_seconds_total", "counter", "CPU time of the server process, user and system"),
    Family("process_resident_memory_bytes", "gauge", "Resident memory of the server process"),
    Family("process_start_time_seconds", "gauge", "When the server process was started, in seconds since 1970"),
    Family("process_open_fds", "gauge", "File descriptors that the server process has open"),
    Family("process_max_fds", "gauge", "File descriptors that the server process may have open"),
    Family("nv_cpu_utilization", "gauge", "CPU utilization rate of the machine [0.0 - 1.0]"),
    Family("nv_cpu_memory_total_bytes", "gauge", "Memory (RAM) of the machine, in bytes"),
    Family("nv_cpu_memory_used_bytes", "gauge", "Used memory (RAM) of the machine, in bytes"),
    Family("nv_pinned_memory_pool_total_bytes", "gauge", "Pinned memory pool, in bytes: there is none, so 0"),
    Family("nv_pinned_memory_pool_used_bytes", "gauge", "Used memory of the pinned memory pool, in bytes: 0"),
    Family("nv_gpu_utilization", "gauge", "GPU utilization rate [0.0 - 1.0]"),
    Family("nv_gpu_memory_total_bytes", "gauge", "GPU total memory, in bytes"),
    Family("nv_gpu_memory_used_bytes", "gauge", "GPU used memory, in bytes"),
    Family("nv_gpu_power_usage", "gauge", "GPU power usage in watts"),
    Family("nv_gpu_power_limit", "gauge", "GPU power management limit in watts"),
    Family("nv_energy_consumption", "counter", "GPU energy consumption in joules since the first scrape"),
    Family("penstock_energy_rest_joules_total", "counter", "Part of nv_energy_consumption that no model accounts for"),
    Family("penstock_gpu_up", "gauge", "Whether the GPU responds; 0 if it was seen and is lost"),
    Family("penstock_gpu_visible", "gauge", "Whether this process may use the GPU (CUDA_VISIBLE_DEVICES)"),
    Family("penstock_gpu_process_memory_bytes", "gauge", "Memory of the GPU that this server's processes use"),
    Family("penstock_gpu_memory_activity", "gauge", "Fraction of time in which the GPU's memory was read or written"),
    Family("penstock_gpu_temperature_celsius", "gauge", "Temperature of the GPU"),
    Family("penstock_gpu_clock_hertz", "gauge", "Clocks of the GPU, by clock"),
    Family("penstock_gpu_clock_limit_hertz", "gauge", "The highest clocks of the GPU, by clock"),
    Family("penstock_gpu_clocks_held", "gauge", "Whether the GPU's clocks are throttled, by reason"),
    Family("penstock_nvml_up", "gauge", "Whether NVML, which reports on GPUs, responds"),
)
