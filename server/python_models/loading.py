"""Loading of Python models: runs their code to complete the configuration, and makes a PythonModelHost per Instance.

Created by the composition root, called by the Engine when a version whose backend is "python" is opened.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from penstock.backends.errors import Code, InferError
from penstock.batching.running.external_models import OpenedVersion, active_groups, complete_external
from penstock.server.repository.completed_config import complete_config, to_json
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.fields.identity import PYTHON
from penstock.server.repository.pbtxt import parse_json
from penstock.server.repository.scan import read_folder
from penstock.server.workers.order import NotStartedError, Order
from penstock.server.workers.restarting import start_all
from penstock.server.workers.worker import Worker

from .batch_codec import BatchCodec
from .host import PythonModelHost
from .source_inspection import may_complete
from .upcalls import ServerSide, Upcalls

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.spec import InstanceGroup, ModelSpec
    from penstock.server.environments.environments import Environments

SERVICE = "penstock.server.python_models.inside.service"
REQUIRED_PACKAGES = ("numpy",)
"""What the user's environment must contain: one packed for Triton has numpy, but not orjson."""
MIN_PYTHON = (3, 10)
"""Its oldest Python: that of Triton's images until the end of 2024, for which many environments were packed."""
_COMPLETABLE_FIELDS = ("input", "output", "max_batch_size", "dynamic_batching", "model_transaction_policy")
"""The fields that `auto_complete_config` may set. Source: python_backend, python_be.cc and model.cc."""


class PythonModels:
    """Opens Python models, each Instance in a process of its own. Threads: the event loop's."""

    def __init__(self, server: ServerSide, environments: Environments, defaults: Defaults) -> None:
        self._server = server
        self._environments = environments
        self._defaults = defaults

    async def open(self, spec: ModelSpec) -> OpenedVersion:
        """Complete a version's configuration, and start a worker for each Instance. Raises: InferError."""
        interpreter = await self._find_interpreter(spec)
        if spec.auto_complete and await asyncio.to_thread(may_complete, spec.path):
            spec = await self._complete_config(spec, interpreter)
        spec = complete_external(spec)
        spec = replace(spec, declared_config=_to_json(complete_config(parse_json(spec.declared_config), spec, PYTHON)))
        return await self._start_hosts(spec, interpreter, _named_instances(spec))

    async def open_more(self, served: ModelSpec, spec: ModelSpec, indexes: Sequence[int]) -> OpenedVersion:
        """Start workers for some additional Instances of a spec. Raises: InferError."""
        interpreter = await self._find_interpreter(spec)
        config = parse_json(served.declared_config)
        config.ClearField("instance_group")
        config.instance_group.extend(parse_json(spec.declared_config).instance_group)
        spec = replace(served, instances=spec.instances)
        spec = replace(spec, declared_config=_to_json(complete_config(config, spec, PYTHON)))
        instances = list(_named_instances(spec))
        return await self._start_hosts(spec, interpreter, [instances[index] for index in indexes])

    async def _find_interpreter(self, spec: ModelSpec) -> str:
        label = f"model '{spec.name}'"
        return await asyncio.to_thread(
            self._environments.interpreter, spec.worker, label, REQUIRED_PACKAGES, MIN_PYTHON
        )

    async def _start_hosts(
        self, spec: ModelSpec, interpreter: str, instances: Iterable[tuple[InstanceGroup, str]]
    ) -> OpenedVersion:
        """Start a worker for each of the given Instances, each a group and a name."""
        codec = BatchCodec(spec, self._server.context_for)
        orders = [_make_order(spec, interpreter, instance, None, group) for group, instance in instances]
        hosts = [
            PythonModelHost(order, codec, partial(Upcalls, self._server, order.log_fields), spec.worker.timeout_s)
            for order in orders
        ]
        await start_all(hosts)
        return OpenedVersion(spec, list(hosts), PYTHON)

    async def _complete_config(self, spec: ModelSpec, interpreter: str) -> ModelSpec:
        """Run the model's code to complete its configuration, and read the spec from the result. Raises: InferError."""
        (group, instance), *_ = [*_named_instances(spec), (spec.instances[0], spec.name)]
        order = _make_order(spec, interpreter, instance, orjson.loads(spec.declared_config), group)

        def on_message(kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
            upcalls.on_message(kind, number, body, arrays)

        worker = Worker(order, on_message=on_message)
        upcalls = Upcalls(self._server, order.log_fields, worker)
        try:
            body, _ = await worker.ready
        except NotStartedError as error:
            raise InferError(Code.NOT_READY, f"{order.label} has ended") from error
        except asyncio.CancelledError:
            worker.kill(f"{order.label} is no longer needed")
            raise
        finally:
            worker.stop()
            await worker.ended
            upcalls.cancel_all()
        config_json = orjson.loads(body)["config"]
        if config_json is None:
            return spec
        config = parse_json(spec.declared_config)
        completed = parse_json(orjson.dumps(config_json))
        for field in _COMPLETABLE_FIELDS:
            config.ClearField(field)
            if _is_set(completed, field):
                _copy(config, completed, field)
        return await asyncio.to_thread(_reread_spec, spec, config, self._defaults)


def _reread_spec(spec: ModelSpec, config: Any, defaults: Defaults) -> ModelSpec:
    """Read a version's spec from a changed ModelConfig. Raises: InferError (INVALID)."""
    entry = read_folder(spec.path.parents[1], defaults, config)
    if entry is not None:
        mistakes = [
            finding for finding in entry.findings if finding.is_mistake and finding.version in {0, spec.version}
        ]
        matching = next((each for each in entry.specs if each.version == spec.version), None)
        if matching is not None and not mistakes:
            return replace(matching, name=spec.name)
        text = "; ".join(finding.message for finding in mistakes)
        raise InferError(Code.INVALID, f"after auto_complete_config, model '{spec.name}': {text}")
    raise InferError(Code.INVALID, f"model '{spec.name}' was removed")


def _is_set(message: Any, field: str) -> bool:
    descriptor = message.DESCRIPTOR.fields_by_name[field]
    return message.HasField(field) if descriptor.has_presence else bool(getattr(message, field))


def _copy(config: Any, source: Any, field: str) -> None:
    descriptor = config.DESCRIPTOR.fields_by_name[field]
    if descriptor.is_repeated:
        getattr(config, field).extend(getattr(source, field))
    elif descriptor.message_type is not None:
        getattr(config, field).CopyFrom(getattr(source, field))
    else:
        setattr(config, field, getattr(source, field))


def _named_instances(spec: ModelSpec) -> Iterator[tuple[InstanceGroup, str]]:
    """Yield each Instance's group and its name, in Triton's format."""
    counts: Counter[int] = Counter()
    for group in active_groups(spec):
        for _ in range(group.count):
            yield group, f"{spec.name}_{group.number}_{counts[group.number]}"
            counts[group.number] += 1


def _make_order(
    spec: ModelSpec, interpreter: str, instance: str, complete: Mapping[str, Any] | None, group: InstanceGroup
) -> Order:
    """Return the Order of a worker: one that serves, or one that completes a configuration."""
    folder, device = spec.path.parents[1], group.devices[0]
    args = {
        "model_config": spec.declared_config,
        "model_instance_kind": _instance_kind(spec, group),
        "model_instance_name": instance,
        "model_instance_device_id": device.partition(":")[2] or "0",
        "model_repository": str(folder),
        "model_version": str(spec.version),
        "model_name": spec.name,
    }
    return Order(
        SERVICE,
        {"file": str(spec.path), "args": args, "complete": complete},
        f"model '{spec.name}' instance '{instance}'",
        {"model": spec.name, "version": str(spec.version), "instance": instance},
        interpreter=interpreter,
        path=spec.worker.path,  # it comes before the model's own folders, as in Triton: inside/loading.py
        environment=spec.worker.environment,
        memory_bytes=spec.worker.memory_bytes,
    )


def _instance_kind(spec: ModelSpec, group: InstanceGroup) -> str:
    """Return a group's kind as Triton reports it. With KIND_MODEL the code decides where it runs."""
    declared = orjson.loads(spec.declared_config).get("instance_group", [])
    if group.number < len(declared) and declared[group.number]["kind"] == "KIND_MODEL":
        return "MODEL"
    return "CPU" if group.devices[0] == "cpu" else "GPU"


def _to_json(config: Any) -> str:
    return orjson.dumps(to_json(config)).decode()
