"""Loading of Python models: runs their code to complete the configuration, and makes a PythonModelHost per Instance.

Created by the composition root, called by the Engine when a version whose backend is "python" is opened.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from penstock.backends.errors import Code, InferError
from penstock.batching.running.external_models import OpenedVersion, active_groups, complete_external
from penstock.server.repository.completed_config import complete_config, to_json
from penstock.server.repository.fields.identity import PYTHON
from penstock.server.repository.pbtxt import parse_json
from penstock.server.repository.scan import Defaults, read_folder
from penstock.server.workers.order import NotStartedError, Order
from penstock.server.workers.restarting import start_all
from penstock.server.workers.worker import Worker

from .completing import may_complete
from .host import PythonModelHost
from .requests import Names
from .upcalls import ServerSide, Upcalls

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.spec import InstanceGroup, ModelSpec
    from penstock.server.environments.environments import Environments

SERVICE = "penstock.server.python_models.inside.service"
MUST = ("numpy",)
"""What the user's environment must contain: one packed for Triton has numpy, but not orjson."""
OLDEST = (3, 10)
"""Its oldest Python: that of Triton's images until the end of 2024, for which many environments were packed."""
_COMPLETES = ("input", "output", "max_batch_size", "dynamic_batching", "model_transaction_policy")
"""The fields that `auto_complete_config` may set. Source: python_backend, python_be.cc and model.cc."""


class PythonModels:
    """Opens Python models, each Instance in a process of its own. Threads: the event loop's."""

    def __init__(self, beside: ServerSide, environments: Environments, defaults: Defaults) -> None:
        self._beside = beside
        self._environments = environments
        self._defaults = defaults

    async def open(self, spec: ModelSpec) -> OpenedVersion:
        """Complete a version's configuration, and start a worker for each Instance. Raises: InferError."""
        interpreter = await self._interpreter(spec)
        if spec.auto_complete and await asyncio.to_thread(may_complete, spec.path):
            spec = await self._completed(spec, interpreter)
        spec = complete_external(spec)
        spec = replace(spec, declared_config=_json(complete_config(parse_json(spec.declared_config), spec, PYTHON)))
        return await self._started(spec, interpreter, _instances(spec))

    async def open_more(self, served: ModelSpec, spec: ModelSpec, places: Sequence[int]) -> OpenedVersion:
        """Start workers for some additional Instances of a spec. Raises: InferError."""
        interpreter = await self._interpreter(spec)
        config = parse_json(served.declared_config)
        config.ClearField("instance_group")
        config.instance_group.extend(parse_json(spec.declared_config).instance_group)
        spec = replace(served, instances=spec.instances)
        spec = replace(spec, declared_config=_json(complete_config(config, spec, PYTHON)))
        seats = list(_instances(spec))
        return await self._started(spec, interpreter, [seats[at] for at in places])

    async def _interpreter(self, spec: ModelSpec) -> str:
        label = f"model '{spec.name}'"
        return await asyncio.to_thread(self._environments.interpreter, spec.worker, label, MUST, OLDEST)

    async def _started(
        self, spec: ModelSpec, interpreter: str, seats: Iterable[tuple[InstanceGroup, str]]
    ) -> OpenedVersion:
        """Start a worker for each of the given Instances, each a group and a name."""
        names = Names(spec, self._beside.context_for)
        orders = [_order(spec, interpreter, instance, None, group) for group, instance in seats]
        hosts = [PythonModelHost(order, names, self._deals(order), spec.worker.timeout_s) for order in orders]
        await start_all(hosts)
        return OpenedVersion(spec, list(hosts), PYTHON)

    def _deals(self, order: Order) -> Any:
        return lambda worker, requests: Upcalls(worker, self._beside, order.log_fields, requests)

    async def _completed(self, spec: ModelSpec, interpreter: str) -> ModelSpec:
        """Run the model's code to complete its configuration, and read the spec from the result. Raises: InferError."""
        (group, instance), *_ = [*_instances(spec), (spec.instances[0], spec.name)]
        order = _order(spec, interpreter, instance, orjson.loads(spec.declared_config), group)

        def hear(kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
            upcalls.take(kind, number, body, arrays)

        worker = Worker(order, on_message=hear)
        upcalls = Upcalls(worker, self._beside, order.log_fields)
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
            upcalls.end()
        said = orjson.loads(body)["config"]
        if said is None:
            return spec
        config = parse_json(spec.declared_config)
        told = parse_json(orjson.dumps(said))
        for field in _COMPLETES:
            config.ClearField(field)
            if _is_set(told, field):
                _copy(config, told, field)
        return await asyncio.to_thread(_read_again, spec, config, self._defaults)


def _read_again(spec: ModelSpec, config: Any, defaults: Defaults) -> ModelSpec:
    """Read a version's spec from a changed ModelConfig. Raises: InferError (INVALID)."""
    entry = read_folder(spec.path.parents[1], defaults, config)
    if entry is not None:
        mistakes = [
            finding for finding in entry.findings if finding.is_mistake and finding.version in {0, spec.version}
        ]
        found = next((each for each in entry.specs if each.version == spec.version), None)
        if found is not None and not mistakes:
            return replace(found, name=spec.name)
        text = "; ".join(finding.message for finding in mistakes)
        raise InferError(Code.INVALID, f"after auto_complete_config, model '{spec.name}': {text}")
    raise InferError(Code.INVALID, f"model '{spec.name}' is gone")


def _is_set(message: Any, field: str) -> bool:
    described = message.DESCRIPTOR.fields_by_name[field]
    return message.HasField(field) if described.has_presence else bool(getattr(message, field))


def _copy(config: Any, told: Any, field: str) -> None:
    described = config.DESCRIPTOR.fields_by_name[field]
    if described.is_repeated:
        getattr(config, field).extend(getattr(told, field))
    elif described.message_type is not None:
        getattr(config, field).CopyFrom(getattr(told, field))
    else:
        setattr(config, field, getattr(told, field))


def _instances(spec: ModelSpec) -> Iterator[tuple[InstanceGroup, str]]:
    """Yield each Instance's group and its name, in Triton's format."""
    counted: Counter[int] = Counter()
    for group in active_groups(spec):
        for _ in range(group.count):
            yield group, f"{spec.name}_{group.number}_{counted[group.number]}"
            counted[group.number] += 1


def _order(
    spec: ModelSpec, interpreter: str, instance: str, complete: Mapping[str, Any] | None, group: InstanceGroup
) -> Order:
    """Return the Order of a worker: one that serves, or one that completes a configuration."""
    folder, device = spec.path.parents[1], group.devices[0]
    args = {
        "model_config": spec.declared_config,
        "model_instance_kind": _kind(spec, group),
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


def _kind(spec: ModelSpec, group: InstanceGroup) -> str:
    """Return a group's kind as Triton reports it. With KIND_MODEL the code decides where it runs."""
    declared = orjson.loads(spec.declared_config).get("instance_group", [])
    if group.number < len(declared) and declared[group.number]["kind"] == "KIND_MODEL":
        return "MODEL"
    return "CPU" if group.devices[0] == "cpu" else "GPU"


def _json(config: Any) -> str:
    return orjson.dumps(to_json(config)).decode()
