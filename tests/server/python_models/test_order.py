"""The arguments about its Instance that a Python model receives."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.server.python_models.loading import _make_order, _named_instances
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.gpus import Gpus
from penstock.server.repository.scan import read_folder
from tests.server.repository.folders import make


@pytest.mark.parametrize(
    ("config", "gpus", "expected"),
    [
        ("", (), [("m_0_0", "CPU", "0")]),
        ("", (0, 1), [("m_0_0", "GPU", "0"), ("m_0_1", "GPU", "1")]),
        ("instance_group { kind: KIND_GPU gpus: [1, 0] }", (0, 1), [("m_0_0", "GPU", "1"), ("m_0_1", "GPU", "0")]),
        (
            "instance_group [ { kind: KIND_GPU count: 2 gpus: 1 }, { kind: KIND_CPU }, { kind: KIND_MODEL } ]",
            (0, 1),
            [("m_0_0", "GPU", "1"), ("m_0_1", "GPU", "1"), ("m_1_0", "CPU", "0"), ("m_2_0", "MODEL", "0")],
        ),
    ],
)
def test_each_instance_receives_its_kind_and_its_gpu(
    tmp_path: Path, config: str, gpus: tuple[int, ...], expected: list[tuple[str, str, str]]
) -> None:
    make(tmp_path, "m/1/model.py", m=config)
    entry = read_folder(tmp_path / "m", Defaults(gpus=Gpus.from_numbers(gpus)))
    assert entry is not None
    (spec,) = entry.specs
    orders = [_make_order(spec, "", instance, None, group) for group, instance in _named_instances(spec)]
    args = [order.settings["args"] for order in orders]

    assert [
        tuple(each[f"model_instance_{key}"] for key in ("name", "kind", "device_id")) for each in args
    ] == expected  # fmt: skip
