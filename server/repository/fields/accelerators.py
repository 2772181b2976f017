"""The options of ONNX Runtime's providers, by name and value, for both config.pbtxt and penstock.toml.

The names are ONNX Runtime's own, plus those of Triton's TensorRT parameters. Source: the providers' options of ONNX
Runtime 1.31, and the README of Triton's onnxruntime_backend.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

Check = Callable[[str], str]
"""Converts a text to the form that ONNX Runtime reads. Raises ValueError with the accepted values."""

CUDA, TENSORRT = "cuda", "tensorrt"
TITLES = {CUDA: "CUDA", TENSORRT: "TensorRT"}
_TRUE, _FALSE = frozenset({"true", "1"}), frozenset({"false", "0"})
_SHAPES = re.compile(r"[^,:]+(:[^,:]+)*:\d+(x\d+)*(,[^,:]+(:[^,:]+)*:\d+(x\d+)*)*")


def flag(value: str) -> str:
    """Accept a boolean."""
    if value.lower() not in _TRUE | _FALSE:
        raise ValueError("true or false")
    return "1" if value.lower() in _TRUE else "0"


def integer(low: int, high: int) -> Check:
    """Accept an integer."""

    def check(value: str) -> str:
        if not re.fullmatch(r"-?\d{1,20}", value, re.ASCII) or not low <= int(value) <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return str(int(value))

    return check


def one_of(*values: str) -> Check:
    """Accept one of some words."""

    def check(value: str) -> str:
        if value not in values:
            raise ValueError(f"one of {', '.join(values)}")
        return value

    return check


def _text(value: str) -> str:
    if not value:
        raise ValueError("a text")
    return value


def _same_stream(value: str) -> str:
    if flag(value) == "0":
        # Source: onnxruntime issue 4829
        raise ValueError("true: copies on a separate stream would race with the computation")
    return "1"


def _shapes(value: str) -> str:
    if not _SHAPES.fullmatch(value):
        raise ValueError("input shapes, such as x:1x3x224x224,y:1x8")
    return value


_SIZE, _COUNT = integer(0, 2**64 - 1), integer(0, 2**31 - 1)

CUDA_OPTIONS: Mapping[str, Check] = MappingProxyType({
    "gpu_mem_limit": _SIZE,
    "arena_extend_strategy": one_of("kNextPowerOfTwo", "kSameAsRequested"),
    "cudnn_conv_algo_search": one_of("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "cudnn_conv_use_max_workspace": flag,
    "cudnn_conv1d_pad_to_nc1d": flag,
    "do_copy_in_default_stream": _same_stream,
    "enable_cuda_graph": flag,
    "enable_cudnn": flag,
    "enable_skip_layer_norm_strict_mode": flag,
    "fuse_conv_bias": flag,
    "prefer_nhwc": flag,
    "sdpa_kernel": _COUNT,
    "tunable_op_enable": flag,
    "tunable_op_tuning_enable": flag,
    "tunable_op_max_tuning_duration_ms": _COUNT,
    "use_ep_level_unified_stream": flag,
    "use_tf32": flag,
})  # fmt: skip
"""`enable_cuda_graph` is passed to the Binding, which has a graph for each number of rows."""

TENSORRT_OPTIONS: Mapping[str, Check] = MappingProxyType({
    "trt_auxiliary_streams": integer(-1, 2**31 - 1),
    "trt_bf16_enable": flag,
    "trt_build_heuristics_enable": flag,
    "trt_builder_optimization_level": integer(0, 5),
    "trt_context_memory_sharing_enable": flag,
    "trt_cuda_graph_enable": flag,
    "trt_detailed_build_log": flag,
    "trt_dla_core": _COUNT,
    "trt_dla_enable": flag,
    "trt_dump_ep_context_model": flag,
    "trt_dump_subgraphs": flag,
    "trt_engine_cache_enable": flag,
    "trt_engine_cache_path": _text,
    "trt_engine_cache_prefix": _text,
    "trt_engine_decryption_enable": flag,
    "trt_engine_decryption_lib_path": _text,
    "trt_engine_hw_compatible": flag,
    "trt_ep_context_embed_mode": integer(0, 1),
    "trt_ep_context_file_path": _text,
    "trt_extra_plugin_lib_paths": _text,
    "trt_force_sequential_engine_build": flag,
    "trt_force_timing_cache": flag,
    "trt_fp16_enable": flag,
    "trt_int8_calibration_table_name": _text,
    "trt_int8_enable": flag,
    "trt_int8_use_native_calibration_table": flag,
    "trt_layer_norm_fp32_fallback": flag,
    "trt_load_user_initializer": flag,
    "trt_max_partition_iterations": integer(1, 2**31 - 1),
    "trt_max_workspace_size": _SIZE,
    "trt_min_subgraph_size": integer(1, 2**31 - 1),
    "trt_op_types_to_exclude": _text,
    "trt_preview_features": _text,
    "trt_profile_max_shapes": _shapes,
    "trt_profile_min_shapes": _shapes,
    "trt_profile_opt_shapes": _shapes,
    "trt_sparsity_enable": flag,
    "trt_tactic_sources": _text,
    "trt_timing_cache_enable": flag,
    "trt_timing_cache_path": _text,
    "trt_weight_stripped_engine_enable": flag,
})  # fmt: skip

OPTIONS: Mapping[str, Mapping[str, Check]] = MappingProxyType({CUDA: CUDA_OPTIONS, TENSORRT: TENSORRT_OPTIONS})
"""The options of each provider."""
PRECISION = "precision_mode"
PRECISIONS: Mapping[str, str] = MappingProxyType({
    "FP32": "", "FP16": "trt_fp16_enable", "BF16": "trt_bf16_enable", "INT8": "trt_int8_enable",
})  # fmt: skip
"""Triton's parameter, and the option that each of its values enables."""
TRITON_NAMES: Mapping[str, str] = MappingProxyType({
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
})  # fmt: skip
"""Triton's alternative names for TensorRT options."""
PATH_OPTIONS = frozenset({
    "trt_engine_cache_path", "trt_engine_decryption_lib_path", "trt_ep_context_file_path", "trt_extra_plugin_lib_paths",
    "trt_int8_calibration_table_name", "trt_timing_cache_path",
})  # fmt: skip
"""Options that name files, including libraries. A configuration received over the network must not set them."""

_STREAM = "the server manages the streams"
_ALLOCATOR = "an address has no meaning in a file"
_NOT_SETTABLE = {
    "device_id": "instance_group selects the GPUs", "has_user_compute_stream": _STREAM, "user_compute_stream": _STREAM,
    "gpu_external_alloc": _ALLOCATOR, "gpu_external_free": _ALLOCATOR, "gpu_external_empty_cache": _ALLOCATOR,
    "trt_onnx_bytestream": _ALLOCATOR, "trt_onnx_bytestream_size": _ALLOCATOR,
    "trt_external_data_bytestream": _ALLOCATOR, "trt_external_data_bytestream_size": _ALLOCATOR,
    "trt_onnx_model_folder_path": "the server sets the model's folder",
}  # fmt: skip
"""Provider options that a user cannot set, and why."""


def read(provider: str, parameters: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Read the parameters of a provider.

    Yields: for each, the option's name, its value, and what is wrong with it ("" if nothing is). Values without effect,
    such as FP32, are left out.
    """
    for name, value in sorted(parameters.items()):
        if provider == TENSORRT and name == PRECISION:
            if value not in PRECISIONS:
                yield name, value, f"unsupported precision mode '{value}' is requested"
            elif PRECISIONS[value]:
                yield PRECISIONS[value], "1", ""
            continue
        option = TRITON_NAMES.get(name, name) if provider == TENSORRT else name
        check = OPTIONS[provider].get(option)
        if check is None:
            yield name, value, describe_unknown(provider, name)
            continue
        try:
            yield option, check(value), ""
        except ValueError as error:
            yield option, value, f"parameter '{name}' must be {error}, not '{value}'"


def describe_unknown(provider: str, name: str) -> str:
    """Report that a provider has no such parameter, or that it cannot be set. Source: Triton's onnxruntime_backend."""
    text = f"unknown parameter '{name}' is provided for {TITLES[provider]} Execution Accelerator"
    if name in _NOT_SETTABLE:
        return f"parameter '{name}' cannot be set for {TITLES[provider]} Execution Accelerator: {_NOT_SETTABLE[name]}"
    known = [*OPTIONS[provider], *((PRECISION, *TRITON_NAMES) if provider == TENSORRT else ())]
    similar = difflib.get_close_matches(name, known, 1, 0.6)
    return f"{text}, the nearest known is '{similar[0]}'" if similar else f"{text}, known: {', '.join(known)}"
