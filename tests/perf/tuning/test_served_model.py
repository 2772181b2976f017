from __future__ import annotations

import copy
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from penstock.perf.profiling.control import ControlError, RefusedError
from penstock.perf.tuning.knobs import ORIGINAL
from penstock.perf.tuning.served_model import RejectedSettingError, ServedModel, ServingError, restored_afterwards

ON_DISK: dict[str, Any] = {
    "name": "m",
    "backend": "onnxruntime",
    "max_batch_size": 64,
    "dynamic_batching": {"preferred_batch_size": [64], "max_queue_delay_microseconds": 0},
    "instance_group": [{"name": "m_0", "kind": "KIND_CPU", "count": 1}],
}
TWO, FOUR = (("instance_count", 2),), (("instance_count", 4),)


class FakeServer:
    """Takes any configuration with up to three instances. `loads`: what it was told, None for the files as they are."""

    def __init__(self, served: Mapping[str, Any] = ON_DISK) -> None:
        self.on_disk = copy.deepcopy(ON_DISK)
        self.served: dict[str, Any] = copy.deepcopy(dict(served))
        self.loads: list[Mapping[str, Any] | None] = []
        self.explicit = self.alive = self.obeys = True

    def config(self, model: str, version: str = "") -> dict[str, Any]:
        return copy.deepcopy(self.served)

    def ready(self, model: str = "", version: str = "") -> bool:
        return self.alive

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        if not self.alive:
            raise ControlError("connection refused")
        if not self.explicit:
            raise RefusedError("503 explicit model load / unload is not allowed if polling is enabled")
        self.loads.append(config)
        requested = copy.deepcopy(self.on_disk if config is None else dict(config))
        if requested["instance_group"][0]["count"] > 3:
            raise RefusedError("400 too many\n instances")
        requested["dynamic_batching"].setdefault("preferred_batch_size", [requested["max_batch_size"]])
        if self.obeys:
            self.served = requested


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


def test_a_setting_is_loaded_as_a_complete_configuration(server: FakeServer) -> None:
    served = ServedModel(server, "m")
    served.load(TWO)

    assert served.setting == TWO
    assert server.loads[-1] == {
        **ON_DISK,
        "dynamic_batching": {"max_queue_delay_microseconds": 0},
        "instance_group": [{"name": "m_0", "kind": "KIND_CPU", "count": 2}],
    }


def test_the_original_configuration_is_loaded_from_its_files(server: FakeServer) -> None:
    served = ServedModel(server, "m")
    served.load(TWO)
    served.load(ORIGINAL)

    assert server.loads[-1] is None


def test_a_configuration_from_a_load_request_is_restored_by_a_request() -> None:
    brought = ON_DISK | {"max_batch_size": 8, "dynamic_batching": {"preferred_batch_size": [8]}}
    server = FakeServer(brought)
    served = ServedModel(server, "m")
    served.load(TWO)

    assert served.restore() == ""
    assert server.served["max_batch_size"] == 8


def test_a_rejected_setting_is_reported_in_one_line(server: FakeServer) -> None:
    served = ServedModel(server, "m")

    with pytest.raises(RejectedSettingError, match=r"^400 too many instances$"):
        served.load(FOUR)
    assert served.setting is None


def test_a_setting_that_the_server_ignores_is_rejected(server: FakeServer) -> None:
    served = ServedModel(server, "m")
    server.obeys = False

    with pytest.raises(RejectedSettingError, match="the server reports instance_count 1"):
        served.load(TWO)


def test_a_server_in_another_control_mode_is_told_how_to_start(server: FakeServer) -> None:
    server.explicit = False

    with pytest.raises(ServingError, match="--model-control-mode=explicit --load-model=m"):
        ServedModel(server, "m")


def test_an_ensemble_is_not_tuned() -> None:
    with pytest.raises(ServingError, match="is an ensemble"):
        ServedModel(FakeServer(ON_DISK | {"ensemble_scheduling": {"step": []}}), "m")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ServingError, ZeroDivisionError])
def test_the_model_is_restored_however_a_run_ends(server: FakeServer, error: type[BaseException]) -> None:
    served, lines = ServedModel(server, "m"), list[str]()

    with pytest.raises(error), restored_afterwards(served, lambda: False, lines.append):  # noqa: PT012
        served.load(TWO)
        raise error

    assert server.served == ON_DISK
    assert lines == ["the configuration is as it was before"]


def test_a_ctrl_c_does_not_prevent_restoring(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    served, load = ServedModel(server, "m"), server.load

    def pressed(model: str, config: Mapping[str, Any] | None = None) -> None:
        signal.raise_signal(signal.SIGINT)
        load(model, config)

    with restored_afterwards(served, lambda: False, lambda line: None):
        served.load(TWO)
        monkeypatch.setattr(server, "load", pressed)

    assert server.served == ON_DISK


def test_an_applied_setting_stays(server: FakeServer) -> None:
    served = ServedModel(server, "m")

    with restored_afterwards(served, lambda: True, lambda line: None):
        served.load(TWO)

    assert server.served["instance_group"][0]["count"] == 2


def test_a_server_that_has_died_is_reported_as_not_restored(server: FakeServer) -> None:
    served, lines = ServedModel(server, "m"), list[str]()

    with restored_afterwards(served, lambda: False, lines.append):
        server.alive = False

    assert lines == ["error: the configuration was not restored: connection refused"]


def test_files_that_changed_in_the_meantime_are_reported(server: FakeServer) -> None:
    served = ServedModel(server, "m")
    server.on_disk["max_batch_size"] = 32

    assert "files of its repository have changed" in served.restore()
