"""`instance_group.gpus` and `--model-load-gpu-limit` against a live server, over HTTP and gRPC.

The GPUs are fake: the server's own CUDA code runs, on a runtime that computes on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http

from penstock.server.repository.gpus import Gpus, UsableGpus
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.fake_session import FakeGround, fake_cuda_loader
from tests.clients import models
from tests.clients.parallel_requests import Asking, answers
from tests.clients.test_instances import config_of, reasons
from tests.live import Live, live_server

pytestmark = pytest.mark.slow


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def triton(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpus, "_usable_gpus", lambda _: UsableGpus((0, 1)))


@contextmanager
def served(root: Path, **settings: Any) -> Iterator[tuple[Live, FakeGround]]:
    ground = FakeGround(FakeRuntime())
    with live_server(root, loaders={"onnxruntime": fake_cuda_loader(ground)}, **settings) as live:
        yield live, ground


def sessions(ground: FakeGround) -> list[str]:
    """Return the GPU of each session created, sorted by number."""
    return sorted(options["device_id"] for ((_, options), *_) in ground.providers)


@pytest.mark.parametrize(
    ("group_text", "gpus", "where"),
    [
        ("kind: KIND_GPU gpus: [ 1 ]", [1], ["1"]),
        ("kind: KIND_GPU gpus: [ 1 ] count: 2", [1], ["1", "1"]),
        ("kind: KIND_GPU gpus: [ 0, 1 ]", [0, 1], ["0", "1"]),
        ("kind: KIND_GPU", [0, 1], ["0", "1"]),
        ("kind: KIND_AUTO gpus: [ 0 ]", [0], ["0"]),
        ("gpus: [ 1 ]", [1], ["1"]),
    ],
)
def test_an_instance_group_runs_on_the_gpus_it_names_or_on_all(
    tmp_path: Path, triton: Any, group_text: str, gpus: list[int], where: list[str]
) -> None:
    models.write_identity(tmp_path, "m", f"max_batch_size: 1 instance_group {{ {group_text} }}")
    with served(tmp_path) as (live, ground), Asking(live, triton, "m") as asking:
        (group,) = config_of(live, triton, "m")["instance_group"]
        sent = asking.queue(*[1] * 4)

        assert [answer.error for answer in answers(sent)] == [""] * 4
        assert asking.counts() == ({1: 4}, 4, 4)
        assert (group["kind"], group["gpus"]) == ("KIND_GPU", gpus)
        assert sessions(ground) == where


def test_a_missing_gpu_is_in_the_error_and_the_other_models_are_served(tmp_path: Path, triton: Any) -> None:
    models.write_identity(tmp_path, "far", "instance_group { kind: KIND_GPU gpus: [ 1, 7 ] }")
    models.write_identity(tmp_path, "near", "instance_group { kind: KIND_GPU gpus: [ 0 ] }")
    with served(tmp_path) as (live, ground), Asking(live, triton, "near") as asking:
        found = reasons(live, triton)

        assert "7" in found.pop("far")
        assert found == {"near": ""}
        assert answers([asking.ask()])[0].error == ""
        assert sessions(ground) == ["0"]


class TestModelLoadGpuLimit:
    def test_a_gpu_at_its_memory_limit_takes_no_model_while_another_gpu_does(self, tmp_path: Path, triton: Any) -> None:
        for name, gpu in (("first", 0), ("second", 1)):
            models.write_identity(tmp_path, name, f"instance_group {{ kind: KIND_GPU gpus: [ {gpu} ] }}")
        with served(tmp_path, model_load_gpu_limit=("0:0.0", "1:0.9")) as (live, ground):
            found = reasons(live, triton)
            with Asking(live, triton, "second") as asking:
                assert answers([asking.ask()])[0].error == ""

        assert "not enough memory on cuda:0" in found.pop("first")
        assert found == {"second": ""}
        assert sessions(ground) == ["1"]
