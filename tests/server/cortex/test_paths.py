"""CortexPaths: the meaning of each path of a server of Cortex APIs."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.server.cortex.api import Api
from penstock.server.cortex.paths import ENDPOINT, HEALTH, SIGNATURE, CortexPaths, is_penstock_path


def api(name: str, endpoint: str = "") -> Api:
    """Give an API of deployment `iris`."""
    return Api(Path("project"), "iris", name, endpoint or f"/iris/{name}", "onnx", "model.onnx")


ONE, OTHER = api("classifier"), api("other", "/somewhere/else")


def purpose(paths: CortexPaths, path: str) -> tuple[str, str] | None:
    place = paths.find(path)
    return (place.purpose, place.api.name if place.api else "") if place is not None else None


def test_a_single_api_is_found_at_its_endpoint_and_at_predict() -> None:
    paths = CortexPaths({"classifier": ONE})

    for path in ("/iris/classifier", "/predict"):
        assert purpose(paths, path) == (ENDPOINT, "classifier")
        assert purpose(paths, path + "/signature") == (SIGNATURE, "classifier")
    assert purpose(paths, "/healthz") == (HEALTH, "")


def test_each_of_several_apis_is_found_only_at_its_endpoint() -> None:
    paths = CortexPaths({"classifier": ONE, "other": OTHER})

    assert purpose(paths, "/iris/classifier") == (ENDPOINT, "classifier")
    assert purpose(paths, "/somewhere/else/signature") == (SIGNATURE, "other")
    assert paths.find("/predict") is None
    assert paths.find("/iris/other") is None, "an endpoint takes the place of the path by default"


@pytest.mark.parametrize(
    "path", ["/", "/iris", "/iris/classifier/", "/iris/classifier/x", "//iris/classifier", "/Predict"]
)
def test_other_paths_belong_to_no_api(path: str) -> None:
    assert CortexPaths({"classifier": ONE}).find(path) is None


def test_an_endpoint_takes_precedence_over_the_signature_path_of_another_api() -> None:
    paths = CortexPaths({"one": api("one", "/a"), "two": api("two", "/a/signature")})

    assert purpose(paths, "/a/signature") == (ENDPOINT, "two")


def test_the_root_can_be_an_endpoint() -> None:
    paths = CortexPaths({"one": api("one", "/"), "two": api("two")})

    assert purpose(paths, "/") == (ENDPOINT, "one")
    assert purpose(paths, "/signature") == (SIGNATURE, "one")


def test_paths_are_not_current_after_the_apis_change() -> None:
    apis = {"classifier": ONE}
    paths = CortexPaths(apis)

    assert paths.is_current(apis)
    assert not paths.is_current({"classifier": ONE})
    apis["other"] = OTHER
    assert not paths.is_current(apis)


def test_only_paths_of_penstock_itself_are_recognized_as_penstock_paths() -> None:
    assert all(
        map(is_penstock_path, ("/v2", "/v2/health/ready", "/v2/models/m/infer", "/metrics", "/docs", "/openapi.json"))
    )
    assert not any(
        map(is_penstock_path, ("/", "/healthz", "/predict", "/v2x/y", "/docs/classifier", "/metrics/x", "/v1/x"))
    )
