"""The command line of `penstock sagemaker`, and the variables of Triton's `serve`, as settings. Called by cli.py.

Source: Triton server, docker/sagemaker/serve, which SageMaker runs with the argument `serve`: variables and defaults.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.server.options.backend_config import ineffective_rules
from penstock.server.options.own_flags import parse_own_flags
from penstock.server.options.setting import PREFIX
from penstock.server.options.triton_flags import rename_flag, translate_flags, unsupported_reason
from penstock.server.repository.scan import CONFIG_FILE
from penstock.server.settings import SettingError, Settings, resolve

NAME = "penstock sagemaker"
MODELS = Path("/opt/ml/model")
"""Where SageMaker unpacks the archive of an endpoint with one model."""
DEFAULT = "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
EXTRA_ARGS = "SAGEMAKER_TRITON_ADDITIONAL_ARGS"
USAGE_STATUS = 2
_FIXED = {
    "allow_sagemaker": "true", "allow_http": "false", "allow_grpc": "false", "allow_metrics": "false",
    "model_control_mode": "explicit",
}  # fmt: skip
_VARIABLES = {
    "allow_grpc": "SAGEMAKER_TRITON_ALLOW_GRPC",
    "grpc_port": "SAGEMAKER_TRITON_GRPC_PORT",
    "allow_metrics": "SAGEMAKER_TRITON_ALLOW_METRICS",
    "metrics_port": "SAGEMAKER_TRITON_METRICS_PORT",
    "sagemaker_ping_mode": "SAGEMAKER_TRITON_OVERRIDE_PING_MODE",
    "sagemaker_port": "SAGEMAKER_BIND_TO_PORT",
    "sagemaker_safe_port_range": "SAGEMAKER_SAFE_PORT_RANGE",
    "sagemaker_thread_count": "SAGEMAKER_TRITON_THREAD_COUNT",
    "log_info": "SAGEMAKER_TRITON_LOG_INFO",
    "log_warning": "SAGEMAKER_TRITON_LOG_WARNING",
    "log_error": "SAGEMAKER_TRITON_LOG_ERROR",
}
_VERBOSE = "SAGEMAKER_TRITON_LOG_VERBOSE"
_GPU_LIMIT = "SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT"
_LEVELS = {"true": "1", "false": "0"}
_REPEATABLE = ("model_repository", "load_model")
"""Settings that flags extend: in Triton's `serve` the script's own value is a flag, and these may be repeated."""
_ALL_MODELS = "*"


def _count_gpus() -> int:
    """Count the GPUs of this machine; 0, with a warning, if NVML does not answer, as on a machine without a driver."""
    from penstock.server.gpus.nvml import Nvml  # only if a limit is set

    nvml = Nvml()
    try:
        return len(nvml.read())
    except Exception as error:  # noqa: BLE001 - an NVMLError has a subclass for each reason
        sys.stderr.write(f"{NAME}: warning: {_GPU_LIMIT} has no effect: NVML does not report the GPUs: {error}\n")
        return 0
    finally:
        nvml.close()


def run(argv: Sequence[str], serve: Callable[[Settings], int]) -> int:
    """Run a command line. Returns: the exit status."""
    try:
        settings = parse_settings(argv, os.environ)
    except SettingError as error:
        sys.stderr.write(f"{NAME}: {error}\n")
        return USAGE_STATUS
    return serve(settings)


def parse_settings(
    argv: Sequence[str], environ: Mapping[str, str], models: Path = MODELS, gpus: Callable[[], int] = _count_gpus
) -> Settings:
    """Parse a command line. Its flags override PENSTOCK_ variables, and those override SageMaker's.

    Raises: SettingError.
    """
    try:
        extra_arguments = shlex.split(environ.get(EXTRA_ARGS, ""))
    except ValueError as error:
        raise SettingError(f"{EXTRA_ARGS}: {error}") from None
    arguments = [*_trailing_flags(environ), *extra_arguments, *(argv[1:] if list(argv[:1]) == ["serve"] else argv)]
    arguments, ignored = translate_flags(map(rename_flag, arguments))
    flags, remaining = parse_own_flags(NAME, arguments, ())
    if remaining:
        text = f"unknown argument {remaining[0]}: it takes flags of `penstock serve`, and no PATH"
        raise SettingError(unsupported_reason(remaining[0]) or text)
    defaults = _from_environment(environ, gpus)
    if environ.get("SAGEMAKER_MULTI_MODEL") != "true":
        model = _find_model(models, environ.get(DEFAULT, ""))
        defaults |= {"model_repository": str(models), "load_model": model, "sagemaker_default_model": model}
        repeated = [name for name in _REPEATABLE if name in flags and _ALL_MODELS not in flags[name]]
        flags |= {name: [defaults[name], *flags[name]] for name in repeated}
    environment_defaults = {PREFIX + name.upper(): text for name, text in defaults.items()}
    settings = resolve(flags, {**environment_defaults, **environ})
    for text in (*ignored, *ineffective_rules(settings.backend_config)):
        sys.stderr.write(f"{NAME}: warning: {text}\n")
    return settings


def _trailing_flags(environ: Mapping[str, str]) -> list[str]:
    """Return the flags after a variable's value, as in `false --load-model=vae`: the script does not quote values."""
    return [
        argument for variable in (*_VARIABLES.values(), _VERBOSE) for argument in environ.get(variable, "").split()[1:]
    ]


def _from_environment(environ: Mapping[str, str], gpus: Callable[[], int]) -> dict[str, str]:
    """Return the settings in the environment, except the models."""
    # a multi-model endpoint survives the failure of one of its models
    ping = "live" if environ.get("SAGEMAKER_MULTI_MODEL") == "true" else "ready"
    values = {**_FIXED, "sagemaker_ping_mode": ping}
    arguments = {name: environ.get(variable, "").split()[:1] for name, variable in _VARIABLES.items()}
    values |= {name: value for name, given in arguments.items() for value in given}
    for verbose in environ.get(_VERBOSE, "").split()[:1]:
        values["log_verbose"] = _LEVELS.get(verbose.lower(), verbose)
    if limit := environ.get(_GPU_LIMIT):
        values["model_load_gpu_limit"] = "\n".join(f"{number}:{limit}" for number in range(gpus()))
    return values


def _find_model(models: Path, name: str) -> str:
    """Return the name of the model that a single-model endpoint serves. Raises: SettingError."""
    if (models / CONFIG_FILE).exists():
        raise SettingError(f"{models} is the folder of one model: the archive must have the model's folder at its top")
    if name:
        if not (models / name).is_dir():
            raise SettingError(f"{DEFAULT}: there is no folder {models / name}")
        return name
    folders = sorted(each.name for each in models.iterdir() if each.is_dir()) if models.is_dir() else []
    if not folders:
        raise SettingError(f"there is no model in {models}")
    if len(folders) > 1:
        raise SettingError(f"{DEFAULT} must name one of the models in {models}: {', '.join(folders)}")
    return folders[0]
