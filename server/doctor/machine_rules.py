"""Rules about the machine: CPUs, memory, limits, ports and packages; and about the models that are to be served on it.

Pure: Facts in, Diagnoses out.
"""

from __future__ import annotations

from collections.abc import Iterator

from .facts import LIBRARY_PROBES, Driver, Facts, Limit, Machine
from .packages import ONNX, TENSORFLOW
from .report import ERROR, NOTE, OK, WARNING, Diagnosis, size

_SHM = "/dev/shm"  # noqa: S108 - the mount point itself; nothing is written there
_MIN_FILES = 4096
"""Each connection uses a file, and so do a worker's sockets and regions of shared memory."""
_MIN_BACKLOG = 1024
_MIN_SHM_BYTES = 256 << 20
"""Docker's default is 64 MiB; pictures of a few clients or arrays of a few workers need more."""
_MIN_FREE_BYTES = 512 << 20
_CUDA = "cuda:"


def judge_machine(facts: Facts) -> Iterator[Diagnosis]:
    """Judge what all serving requires, also on CPUs."""
    for name in (name for name in facts.failures if name not in LIBRARY_PROBES):
        remedy = "run `penstock check PATH...` for details" if name == "models" else "check that it is readable"
        yield Diagnosis(WARNING, name, f"could not be examined: {facts.failures[name]}", remedy)
    machine = facts.machine
    yield from _judge_versions(facts)
    yield from _judge_cpus(machine)
    yield from _judge_memory(machine)
    yield from _judge_shared_memory(machine)
    yield from _judge_limits(machine)
    for port in facts.ports:
        port_text = f"{port.name} port {port.address}:{port.port}"
        if port.bind_error:
            remedy = f"stop the process that listens there, or choose another --{port.name.lower()}-port"
            yield Diagnosis(WARNING, "ports", f"{port_text} cannot be used: {port.bind_error}", remedy)
        else:
            yield Diagnosis(OK, "ports", f"{port_text} is {'shared with other servers' if port.shared else 'free'}")


def _judge_versions(facts: Facts) -> Iterator[Diagnosis]:
    machine, packages = facts.machine, facts.packages
    yield Diagnosis(OK, "software", f"Python {machine.python or '?'} on {machine.kernel or '?'}")
    if machine.slow_python:
        yield Diagnosis(
            NOTE, "software", "this Python was compiled without optimizations: requests take at least 10% more CPU",
            "use one from a distribution or image; PYTHON_CONFIGURE_OPTS='--enable-optimizations --with-lto' pyenv "
            "install",
        )  # fmt: skip
    packages_text = [f"{name} {packages[name]}" for name in ("penstock", "numpy", "tritonclient") if name in packages]
    yield Diagnosis(OK, "software", ", ".join(packages_text) or "no package reports its version")
    tensorflow = [f"{name} {packages[name]}" for name in TENSORFLOW if name in packages]
    if tensorflow:
        yield Diagnosis(OK, "software", f"{', '.join(tensorflow)}: SavedModels are served")
    else:
        yield Diagnosis(
            NOTE, "software", "TensorFlow is not installed: no SavedModel is served",
            "if you have any: pip install 'penstock[tensorflow]'",
        )  # fmt: skip
    onnx = [f"{name} {packages[name]}" for name in ONNX if name in packages]
    if not onnx and not tensorflow and "packages" not in facts.failures:
        remedy = "pip install 'penstock[cpu]', or 'penstock[gpu]' for NVIDIA GPUs"
        yield Diagnosis(ERROR, "software", "neither ONNX Runtime nor TensorFlow is installed: no model loads", remedy)


def _judge_cpus(machine: Machine) -> Iterator[Diagnosis]:
    if machine.usable_cpus is None:
        return
    threads = f"{machine.usable_cpus} threads run a model at once"
    parts = [f"{machine.cpus} of the machine" if machine.cpus else "", f"{machine.affinity_cpus} of the affinity mask"]
    if machine.quota_cpus is not None:
        parts.append(f"a quota of {machine.quota_cpus:.3g} (cgroup version {machine.cgroup or '?'})")
    yield Diagnosis(OK, "CPUs", f"{threads}: {', '.join(part for part in parts if part)}")
    if machine.quota_cpus is not None and machine.quota_cpus < 1:
        yield Diagnosis(
            WARNING, "CPUs", f"the quota of {machine.quota_cpus:.3g} CPUs stops every thread most of the time",
            "give at least 1 CPU (--cpus, resources.limits.cpu), or only a request for CPUs and no limit",
        )  # fmt: skip
    elif machine.quota_cpus is not None and machine.quota_cpus != int(machine.quota_cpus):
        text = f"of {machine.quota_cpus:.3g} CPUs the part beyond {int(machine.quota_cpus)} serves only the front end"
        yield Diagnosis(NOTE, "CPUs", text, "use a whole number of CPUs")


def _judge_memory(machine: Machine) -> Iterator[Diagnosis]:
    if machine.memory_bytes is None:
        return
    limit, free = machine.memory_limit_bytes, machine.free_bytes
    limited = f", {size(limit)} of it for this container" if limit is not None else ""
    summary = f"{size(machine.memory_bytes)}{limited}" + (f"; {size(free)} free" if free is not None else "")
    if free is not None and free < _MIN_FREE_BYTES:
        remedy = "free memory, or raise the container's limit"
        yield Diagnosis(WARNING, "memory", summary, remedy)
    else:
        yield Diagnosis(OK, "memory", summary)


def _judge_shared_memory(machine: Machine) -> Iterator[Diagnosis]:
    total, free = machine.shm_bytes, machine.shm_free_bytes
    if total is None or free is None:
        text = "it does not exist: no shared memory between clients, workers and server"
        yield Diagnosis(WARNING, _SHM, text, "mount a tmpfs there; in Kubernetes an emptyDir of medium Memory")
        return
    summary = f"{size(total)}, {size(free)} free"
    if min(total, free) < _MIN_SHM_BYTES:
        remedy = f"docker run --shm-size 1g; in Kubernetes an emptyDir of medium Memory at {_SHM}"
        yield Diagnosis(WARNING, _SHM, f"{summary}: workers and large tensors may need more", remedy)
    else:
        yield Diagnosis(OK, _SHM, summary)


def _judge_limits(machine: Machine) -> Iterator[Diagnosis]:
    files = machine.limits.get("open files")
    if files is not None and files.hard is not None and files.hard < _MIN_FILES:
        remedy = f"ulimit -n {_MIN_FILES * 16}; docker run --ulimit nofile={_MIN_FILES * 16}"
        yield Diagnosis(WARNING, "limits", f"{files.hard} open files, which many connections exhaust", remedy)
    summary = ", ".join(f"{name} {_format_limit(name, limit)}" for name, limit in machine.limits.items())
    if summary:
        yield Diagnosis(OK, "limits", summary)
    backlog = machine.somaxconn
    if backlog is not None and backlog < _MIN_BACKLOG:
        text = f"net.core.somaxconn is {backlog}: when many clients connect at once, some are rejected"
        yield Diagnosis(WARNING, "limits", text, "sysctl -w net.core.somaxconn=4096 (docker run --sysctl, too)")
    elif backlog is not None:
        yield Diagnosis(OK, "limits", f"net.core.somaxconn {backlog}")


def _format_limit(name: str, limit: Limit) -> str:
    value = limit.hard if name == "open files" else limit.soft  # `serve` raises its own
    if value is None:
        return "unlimited"
    return str(value) if name == "open files" else size(value)


def judge_models(facts: Facts) -> Iterator[Diagnosis]:
    """Judge the models, if any were given."""
    models = facts.models
    if models is None:
        return
    devices = (facts.driver or Driver()).devices
    for device, names in models.devices.items():
        number = device.removeprefix(_CUDA)
        if device.startswith(_CUDA) and not (number.isascii() and number.isdecimal() and int(number) < len(devices)):
            available = f"the last one here is cuda:{len(devices) - 1}" if devices else "there is none"
            text = f"{', '.join(names)}: requests {device}, but {available}"
            remedy = "see the finding about the driver, or use CPUs: KIND_CPU, or cpu_fallback (docs/gpu.md)"
            yield Diagnosis(ERROR, "models", text, remedy)
        else:
            yield Diagnosis(OK, "models", f"on {device}: {', '.join(names)}")
    for line in models.mistakes:
        yield Diagnosis(ERROR, "models", line, "run `penstock check PATH...` for details")
    for line in models.warnings:
        yield Diagnosis(WARNING, "models", line, "run `penstock check PATH...` for details")
    if not models.mistakes:
        yield Diagnosis(OK, "models", _format_served(models.versions))


def _format_served(versions: int) -> str:
    return "no mistake" if not versions else f"{versions} version{'' if versions == 1 else 's'} would be served"
