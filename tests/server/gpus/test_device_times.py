"""The time that models have used devices since the last reading."""

from __future__ import annotations

import threading

from penstock.server.gpus.device_times import DeviceTimes, Used


class FakeModel:
    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.device_ns: dict[str, int] = {}


def times(models: list[FakeModel]) -> DeviceTimes[FakeModel]:
    return DeviceTimes(lambda: models, lambda model: f'model="{model.name}"')


def test_each_reading_has_the_time_used_since_the_last_reading() -> None:
    a, b = FakeModel("a"), FakeModel("b")
    read = times([a, b]).read
    a.device_ns["cuda:0"] = 5
    first = read()
    a.device_ns.update({"cuda:0": 7, "cuda:1": 1})
    b.device_ns["cuda:0"] = 3

    assert first == {"cuda:0": {'model="a"': 5}}
    assert read() == {"cuda:0": {'model="a"': 2, 'model="b"': 3}, "cuda:1": {'model="a"': 1}}
    assert read() == {}


def test_time_used_before_an_unload_is_reported_once() -> None:
    models = [FakeModel("a")]
    unloaded, read = models[0], times(models).read
    read()
    unloaded.device_ns["cuda:0"] = 5
    models[:] = [FakeModel("a")]
    models[0].device_ns["cuda:0"] = 2

    assert read() == {"cuda:0": {'model="a"': 7}}
    assert read() == {}


def test_no_time_is_lost_in_many_loads_and_unloads() -> None:
    models: list[FakeModel] = []
    read, total_ns = times(models).read, 0

    def total(used: Used) -> int:
        return sum(used.get("cuda:0", {}).values())

    for _ in range(50):
        models[:] = [FakeModel("a")]  # the next model's dict may get the address of a freed one
        models[0].device_ns["cuda:0"] = 3
        total_ns += total(read())
        models[0].device_ns["cuda:0"] += 4
    total_ns += total(read())

    assert total_ns == 50 * 7
