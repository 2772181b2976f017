"""Rules about GPUs: driver, CUDA's libraries, ONNX Runtime's providers. Pure: Facts in, Diagnoses out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .facts import AT_LOAD, CUDNN, LATER, LIBRARY_PROBES, TENSORRT, Driver, Facts, Library, NvmlFacts, OnnxRuntime
from .packages import DRIVER, ONNX, PIP_PREFIXES
from .report import ERROR, NOTE, OK, WARNING, Diagnosis, size

CUDA_PROVIDER = "CUDAExecutionProvider"
_CPU, _GPU = ONNX
_NO_DEVICE, _MISMATCH = "error 100", "error 803"
_MIN_CAPABILITY = {12: (5, 0), 13: (7, 5)}
"""The oldest GPUs that a CUDA version's libraries run on. Source: release notes of CUDA 12.0 and 13.0."""
_PACKAGES = {
    "libcudart": "nvidia-cuda-runtime", "libcublas": "nvidia-cublas", "libcublasLt": "nvidia-cublas",
    "libcufft": "nvidia-cufft", "libcurand": "nvidia-curand", "libcudnn": "nvidia-cudnn",
    "libnvrtc": "nvidia-cuda-nvrtc",
}  # fmt: skip
"""The PyPI packages of the libraries; those for CUDA 12 end in -cu12, and cuDNN's always in its CUDA's version."""
_CONSEQUENCES = {
    AT_LOAD: (ERROR, "them the CUDA provider does not load"),
    CUDNN: (ERROR, "it only ONNX models with enable_cudnn = false load on a GPU"),
    LATER: (WARNING, "it models that need it (Fourier transforms) fail"),
    TENSORRT: (NOTE, "them models whose execution_accelerators name tensorrt do not load"),
}
"""How serious missing libraries are, and what fails without them."""
_CONTAINER_REMEDY = "in a container: docker run --gpus all, with the NVIDIA Container Toolkit on the host"

_HANG_REMEDY = "see whether nvidia-smi answers; a driver that hangs needs its GPU reset, or the machine restarted"


def judge_gpus(facts: Facts) -> Iterator[Diagnosis]:
    """Judge what serving on GPUs requires; if no GPU is wanted or present, its absence is a note."""
    gpu_wanted = wants_gpu(facts)
    missing_level = ERROR if gpu_wanted else NOTE
    for name in (name for name in LIBRARY_PROBES if name in facts.failures):
        level = ERROR if gpu_wanted or name == "runtime" else WARNING
        remedy = (
            "see what `python -c 'import onnxruntime'` says, and reinstall it" if name == "runtime" else _HANG_REMEDY
        )
        yield Diagnosis(level, name, f"could not be examined: {facts.failures[name]}", remedy)
    yield from _judge_runtime(facts, missing_level)
    yield from _judge_driver(facts, missing_level)
    yield from _judge_devices(facts)
    if gpu_wanted:
        yield from _judge_libraries(facts)
        yield from _judge_provider(facts)
    elif facts.driver is not None and facts.driver.devices:
        remedy = f"to use them: pip uninstall -y {_CPU}; pip install 'penstock[gpu]'"
        yield Diagnosis(NOTE, "GPUs", "nothing that is installed or served uses them", remedy)


def wants_gpu(facts: Facts) -> bool:
    """Return whether a GPU is meant to be used: the installed packages are for GPUs, or a model requests one."""
    models = facts.models.devices if facts.models is not None else {}
    return _GPU in facts.packages or facts.cuda_major > 0 or any(name.startswith("cuda") for name in models)


def _judge_runtime(facts: Facts, missing_level: str) -> Iterator[Diagnosis]:
    installed = [name for name in ONNX if name in facts.packages]
    if len(installed) > 1:
        yield Diagnosis(
            ERROR, "ONNX Runtime", f"{' and '.join(f'{name} {facts.packages[name]}' for name in installed)} are both "
            "installed: they share a folder and overwrite each other's files",
            f"pip uninstall -y {_CPU} {_GPU}; pip install '{_GPU}[cuda,cudnn]', or {_CPU} for CPUs alone",
        )  # fmt: skip
    runtime = facts.runtime
    if runtime is None:
        return
    if runtime.error:
        remedy = "pip install 'penstock[cpu]', or 'penstock[gpu]' for NVIDIA GPUs"
        level = ERROR if installed else WARNING
        yield Diagnosis(level, "ONNX Runtime", f"cannot be imported: {runtime.error}", remedy)
        return
    built = f", built for CUDA {facts.cuda_major}" if facts.cuda_major else ", built for CPUs"
    offered = ", ".join(name.removesuffix("ExecutionProvider") for name in runtime.providers) or "no provider"
    yield Diagnosis(OK, "ONNX Runtime", f"{runtime.version} in {runtime.path}{built}; it offers {offered}")
    if installed and runtime.version and runtime.version not in {facts.packages[name] for name in installed}:
        text = f"{runtime.version} is imported, and {', '.join(facts.packages[name] for name in installed)} installed"
        yield Diagnosis(WARNING, "ONNX Runtime", text, "look for another folder of that name on PYTHONPATH")
    if CUDA_PROVIDER not in runtime.providers and wants_gpu(facts):
        remedy = f"pip uninstall -y {_CPU} {_GPU}; pip install '{_GPU}[cuda,cudnn]'"
        yield Diagnosis(missing_level, "ONNX Runtime", "has no CUDA provider: nothing runs on a GPU", remedy)


def _judge_driver(facts: Facts, missing_level: str) -> Iterator[Diagnosis]:
    driver, files = facts.driver, facts.device_files
    if driver is None:
        return
    files_text = (
        f"; {', '.join(files)} {'is' if len(files) == 1 else 'are'} there" if files else "; there is no /dev/nvidia*"
    )
    if not driver.loaded:
        text = f"none: {driver.error or 'its library cannot be loaded'}{files_text}"
        remedy = (
            _CONTAINER_REMEDY if not files else f"{_CONTAINER_REMEDY}, and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
        remedy = f"install NVIDIA's driver on the host; {remedy}"
        yield Diagnosis(
            missing_level, "driver", text, f"only to use a GPU: {remedy}" if missing_level == NOTE else remedy
        )
        return
    version = facts.nvml.version if facts.nvml is not None else ""
    cuda_text = "runs CUDA up to {}.{}".format(*driver.cuda) if driver.cuda else "does not report its version"
    if driver.error:
        yield Diagnosis(
            missing_level,
            "driver",
            f"{version or DRIVER} does not start: {driver.error}{files_text}",
            _start_remedy(driver),
        )
    else:
        yield Diagnosis(OK, "driver", f"{version or DRIVER} {cuda_text}")
    if driver.cuda and 0 < driver.cuda[0] < facts.cuda_major:
        text = f"{version or DRIVER} {cuda_text}, and ONNX Runtime was built for CUDA {facts.cuda_major}"
        remedy = "install a newer driver (CUDA 13: 580 or newer; 12: 525), or an ONNX Runtime for the older CUDA"
        yield Diagnosis(ERROR, "driver", text, remedy)
    if facts.nvml is not None and facts.nvml.error:
        text = f"NVML does not respond: {facts.nvml.error}; the metrics page has no GPUs"
        yield Diagnosis(WARNING, "driver", text, "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility")


def _start_remedy(driver: Driver) -> str:
    if _NO_DEVICE in driver.error:
        return f"see whether nvidia-smi lists a GPU, and what CUDA_VISIBLE_DEVICES hides; {_CONTAINER_REMEDY}"
    if _MISMATCH in driver.error:
        return "driver and kernel module are of different versions: restart the machine, or the container"
    return "see whether nvidia-smi works; load the kernel module (nvidia, nvidia-uvm), or restart the machine"


def _judge_devices(facts: Facts) -> Iterator[Diagnosis]:
    driver, nvml_gpus = facts.driver or Driver(), (facts.nvml or NvmlFacts()).gpus
    for number, device in enumerate(driver.devices):
        capability = "{}.{}".format(*device.capability) if device.capability else "?"
        memory = size(device.memory_bytes) if device.memory_bytes is not None else "memory unknown"
        yield Diagnosis(OK, "GPUs", f"cuda:{number} {device.name or '?'}, {memory}, compute capability {capability}")
        min_capability = _MIN_CAPABILITY.get(facts.cuda_major)
        if min_capability and device.capability and device.capability < min_capability:
            text = (
                f"cuda:{number} is older than CUDA {facts.cuda_major} runs on ({min_capability[0]}.{min_capability[1]} "
            )
            text += "at least)"
            yield Diagnosis(ERROR, "GPUs", text, "use another GPU, or an ONNX Runtime for an older CUDA")
    for gpu in nvml_gpus:
        if not gpu.present:
            yield Diagnosis(ERROR, "GPUs", f"{gpu.name or '?'} is lost", "reset it (nvidia-smi -r), or restart")
        elif gpu.mig == 0:
            remedy = "make some (nvidia-smi mig -cgi ... -C), or turn MIG off (nvidia-smi -mig 0)"
            yield Diagnosis(ERROR, "GPUs", f"{gpu.name or '?'} is in MIG mode and has no MIG device", remedy)
        elif gpu.mig:
            text = f"{gpu.name or '?'} has {gpu.mig} MIG devices; a process sees one"
            yield Diagnosis(
                NOTE, "GPUs", text, "select one with CUDA_VISIBLE_DEVICES=MIG-...; its utilization is not reported"
            )
        elif gpu.memory_bytes and gpu.used_bytes is not None and gpu.used_bytes > gpu.memory_bytes // 2:
            text = f"{gpu.name or '?'}: {size(gpu.used_bytes)} of {size(gpu.memory_bytes)} is in use"
            yield Diagnosis(NOTE, "GPUs", text, "nvidia-smi shows by which processes")
    if len(nvml_gpus) > len(driver.devices) and driver.loaded and not any(gpu.mig for gpu in nvml_gpus):
        hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
        text = f"CUDA sees {len(driver.devices)} of {len(nvml_gpus)} GPUs"
        yield Diagnosis(NOTE, "GPUs", text + (f": CUDA_VISIBLE_DEVICES is {hidden!r}" if hidden is not None else ""))


def _judge_libraries(facts: Facts) -> Iterator[Diagnosis]:
    libraries = [library for library in facts.libraries if library.name != DRIVER]
    for library in libraries:
        if library.path:
            origin = "" if library.found_by == "loader" else ", installed by pip"
            yield Diagnosis(OK, "CUDA", f"{library.name}: {library.path}{origin}")
    if pip_packages := [
        f"{name} {version}" for name, version in sorted(facts.packages.items()) if name.startswith(PIP_PREFIXES)
    ]:
        yield Diagnosis(OK, "CUDA", f"pip packages: {', '.join(pip_packages)}")
    for needed_when, (level, consequence) in _CONSEQUENCES.items():
        missing = [library for library in libraries if not library.path and library.needed_when == needed_when]
        if missing:
            text = f"missing: {', '.join(library.name for library in missing)}; without {consequence}"
            yield Diagnosis(level, "CUDA", text, _install_command(facts, needed_when, missing))


def _install_command(facts: Facts, needed_when: str, missing: Sequence[Library]) -> str:
    """Return the pip command that installs the missing libraries."""
    if needed_when == TENSORRT:
        return f"pip install tensorrt-cu{facts.cuda_major}, and its folder tensorrt_libs in LD_LIBRARY_PATH"
    command = f"pip install '{_GPU}[cuda,cudnn]{_version_pin(facts)}'"
    packages = dict.fromkeys(name for library in missing if (name := _package_name(library, facts.cuda_major)))
    return f"{command}, which brings {', '.join(packages)}" if packages else command


def _package_name(library: Library, major: int) -> str:
    stem = library.name.partition(".so")[0]
    name = _PACKAGES.get(stem, "")
    return f"{name}-cu{major}" if name and (major == 12 or stem == "libcudnn") else name


def _version_pin(facts: Facts) -> str:
    return f"=={facts.packages[_GPU]}" if _GPU in facts.packages else ""


def _judge_provider(facts: Facts) -> Iterator[Diagnosis]:
    runtime = facts.runtime or OnnxRuntime()
    if runtime.provider_error is None:
        return
    if not runtime.provider_error:
        yield Diagnosis(OK, "CUDA provider", "its library and all of its dependencies load")
    elif DRIVER in runtime.provider_error:
        remedy = "see the finding about the driver"
        yield Diagnosis(ERROR, "CUDA provider", f"does not load: {runtime.provider_error}", remedy)
    else:
        text = f"does not load: {runtime.provider_error}"
        yield Diagnosis(ERROR, "CUDA provider", text, f"pip install '{_GPU}[cuda,cudnn]{_version_pin(facts)}'")
