"""How the Engine sees a model whose calls are carried, and the messages between server and worker."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.spec import InstanceGroup, ModelSpec
from penstock.server.carrying.hosts import SLOTS
from penstock.server.carrying.loading import CALLS_PER_SLOT, complete_spec
from penstock.server.carrying.messages import pack_answer, read_answer

LINES = st.binary().filter(lambda line: b"\r\n" not in line and not line.endswith(b"\r"))


def test_a_carried_model_takes_no_tensors_and_several_calls_in_parallel() -> None:
    spec = complete_spec(ModelSpec("m", 1, Path(), "carried", instances=(InstanceGroup(3),)))

    assert spec.signature is not None
    assert (spec.inputs, spec.outputs, spec.signature.batched) == ((), (), False)
    assert (spec.policy.max_batch_rows, spec.policy.executor) == (CALLS_PER_SLOT, "thread")


def test_a_worker_has_several_slots_but_only_workers_are_declared() -> None:
    spec = complete_spec(ModelSpec("m", 1, Path(), "carried", instances=(InstanceGroup(3),)))

    assert [group.count for group in spec.instances] == [3 * SLOTS]
    assert json.loads(spec.declared_config) == {"name": "m", "instance_group": [{"count": 3, "kind": "KIND_CPU"}]}


@given(st.integers(0, 65535), LINES, st.lists(LINES), st.binary())
def test_an_answer_is_read_as_it_was_written(status: int, kind: bytes, lines: list[bytes], body: bytes) -> None:
    more = b"".join(line + b"\r\n" for line in lines)

    assert read_answer(pack_answer(status, kind + b"\r\n" + more if more else kind, body)) == (status, kind, more, body)
