"""The purpose of each URL of a server of DEEPaaS models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.deepaas.paths import PREDICTIONS, TRAININGS, DeepaasPaths, DeepaasRoute, Purpose
from tests.deepaas.replay import ORIGINAL

NAMES = ("basic", "a-b.c_d", "été")
PATHS = DeepaasPaths(NAMES)
_STATUS = {308: Purpose.REDIRECT, 404: Purpose.NOT_FOUND, 405: Purpose.NOT_ALLOWED, 402: Purpose.DISABLED}
_OTHERWISE = ("/docs", "/openapi.json", "/metrics", "/v2/health/ready", "/static/swagger")
"""What is Penstock's own, or not there at all: the original's third-party page has files of its own."""


def route_of(target: str, method: str = "GET", paths: DeepaasPaths = PATHS, query: str = "") -> DeepaasRoute:
    """Return the route of a request."""
    return paths.find(method.encode(), target.encode(), query.encode())


def recorded() -> Iterator[Any]:
    """Return the original's recorded answers to paths and methods that need no model."""
    for group in ("methods", "slashes", "slashes-posted"):
        for case in ORIGINAL.read(group)["cases"]:
            answer, path = case["answer"], case["path"]
            asks_a_training = "/train/" in path and answer["status"] == 404 and case["method"] in ("GET", "DELETE")
            if answer["status"] in _STATUS and not path.startswith(_OTHERWISE) and not asks_a_training:
                yield pytest.param(case, id=f"{group}-{case['name']}")


@pytest.mark.parametrize("case", list(recorded()))
def test_a_path_is_handled_as_by_the_original(case: Any) -> None:
    target, _, query = case["path"].partition("?")
    place = route_of(target, case["method"], query=query)

    headers = case["answer"]["headers"]
    assert place.purpose is _STATUS[case["answer"]["status"]]
    assert place.location == headers.get("location", headers.get("allow", ""))


@pytest.mark.parametrize(
    ("method", "target", "purpose"),
    [
        ("GET", "/", Purpose.VERSIONS),
        ("GET", "/v2/", Purpose.VERSION),
        ("GET", "/v2/models/", Purpose.MODELS),
        ("GET", "/v2/debug/", Purpose.DEBUG),
        ("GET", "/api", Purpose.API),
        ("GET", "/ui", Purpose.UI),
        ("HEAD", "/ui", Purpose.UI),
        ("GET", "/swagger.json", Purpose.SWAGGER),
        ("GET", "/openapi3.json", Purpose.OPENAPI),
        ("GET", "/v2/models/basic/", Purpose.METADATA),
        ("POST", "/v2/models/basic/predict/", Purpose.PREDICT),
        ("POST", "/v2/models/basic/train/", Purpose.TRAIN),
        ("GET", "/v2/models/basic/train/", Purpose.TRAININGS),
        ("GET", "/v2/models/basic/train/abc", Purpose.TRAINING),
        ("DELETE", "/v2/models/basic/train/abc", Purpose.END_TRAINING),
        ("GET", "/v2/models/basic/train/abc/log", Purpose.LOG),
        ("GET", "/v2/models/basic/train/abc/progress", Purpose.PROGRESS),
        ("GET", "/v2/models/basic/train/abc/page", Purpose.PAGE),
    ],
)
def test_each_path_has_its_purpose(method: str, target: str, purpose: Purpose) -> None:
    assert route_of(target, method).purpose is purpose


def test_a_path_names_its_model_and_its_training() -> None:
    assert route_of("/v2/models/a-b.c_d/train/12%2034")[1:3] == ("a-b.c_d", "12 34")
    assert route_of("/v2/models/%C3%A9t%C3%A9/").name == "été"


@pytest.mark.parametrize(
    "target",
    [
        "/v2/health/live", "/v2/health/ready", "/v2/models/basic/ready", "/v2/models/basic/stats", "/v2/models/stats",
        "/v2/models/basic/config", "/v2/models/other/infer", "/v2/models/other/versions/1/infer", "/v2/logging",
        "/v2/models/basic/versions/1", "/v2/repository/index", "/v2/repository/models/basic/load", "/v2/trace/setting",
        "/v2/models/basic/trace/setting", "/v2/systemsharedmemory/status", "/metrics", "/docs", "/openapi.json",
    ],
)  # fmt: skip
def test_paths_that_only_penstock_has_are_penstocks(target: str) -> None:
    assert route_of(target).purpose is route_of(target, "POST").purpose is Purpose.PENSTOCK


@pytest.mark.parametrize("rest", ["infer", "generate", "generate_stream", "versions/1/infer", "versions/1/predict"])
def test_tensor_endpoints_are_rejected_for_models_that_take_no_tensors(rest: str) -> None:
    assert route_of(f"/v2/models/basic/{rest}", "POST") == DeepaasRoute(Purpose.TENSORS, "basic")
    assert route_of(f"/v2/models/basic/{rest}").purpose is not Purpose.TENSORS


def test_a_path_that_both_have_is_the_originals() -> None:
    assert route_of("/v2") == DeepaasRoute(Purpose.REDIRECT, location="/v2/")
    assert route_of("/v2/models/basic").location == "/v2/models/basic/"
    assert route_of("/v2/models/basic/predict", "POST").location == "/v2/models/basic/predict/"
    assert route_of("/v2/models/stats", paths=DeepaasPaths(("stats",))).location == "/v2/models/stats/"


def test_a_base_path_moves_the_originals_paths_and_not_penstocks() -> None:
    based = DeepaasPaths(NAMES, "/some/base")

    assert route_of("/some/base", paths=based).purpose is Purpose.VERSIONS
    assert route_of("/some/base/", paths=based).purpose is Purpose.NOT_FOUND
    assert route_of("/some/base/v2/models/basic/predict/", "POST", based).purpose is Purpose.PREDICT
    assert (
        route_of("/some/base/v2/models/basic", paths=based, query="x=1").location == "/some/base/v2/models/basic/?x=1"
    )
    assert route_of("/some/base/metrics", paths=based).purpose is Purpose.NOT_FOUND
    for other in ("/", "/v2/", "/v2/models/", "/swagger.json", "/some/basev2/", "/some"):
        assert route_of(other, paths=based).purpose is Purpose.NOT_FOUND
    for ours in ("/v2", "/metrics", "/v2/health/ready", "/v2/models/basic/ready"):
        assert route_of(ours, paths=based).purpose is Purpose.PENSTOCK


def test_a_disabled_endpoint_is_disabled_only_for_its_own_methods() -> None:
    paths = DeepaasPaths(NAMES, disabled=TRAININGS | PREDICTIONS)

    for method, target in (("POST", "predict/"), ("POST", "train/"), ("GET", "train/"), ("DELETE", "train/x")):
        assert route_of(f"/v2/models/basic/{target}", method, paths).purpose is Purpose.DISABLED
    assert route_of("/v2/models/basic/predict/", "PUT", paths) == DeepaasRoute(Purpose.NOT_ALLOWED, location="POST")
    assert route_of("/v2/models/basic/predict", "POST", paths).purpose is Purpose.REDIRECT
    assert route_of("/v2/models/basic/", paths=paths).purpose is Purpose.METADATA


def test_without_documentation_there_is_no_page_and_no_redirect_to_it() -> None:
    paths = DeepaasPaths(NAMES, documents=False)

    assert route_of("/api", paths=paths).purpose is route_of("/ui", paths=paths).purpose is Purpose.NOT_FOUND
    assert route_of("/swagger.json", paths=paths).purpose is Purpose.SWAGGER


def test_a_redirect_never_leads_to_another_host() -> None:
    assert route_of("//v2/models").location == "/v2/models/"
    assert route_of("//evil.example/").purpose is Purpose.NOT_FOUND
    assert route_of("////v2//models//basic").location == "/v2/models/basic/"


def test_a_target_in_absolute_form_is_routed_by_its_path() -> None:
    assert route_of("http://host:5000/v2/models/basic/").purpose is Purpose.METADATA
    assert route_of("http://host").purpose is Purpose.VERSIONS
    assert route_of("*", "OPTIONS").purpose is Purpose.NOT_FOUND


@pytest.mark.parametrize(
    ("target", "purpose"),
    [
        ("/v2/models//", Purpose.REDIRECT),
        ("/v2/models/basic/train//", Purpose.REDIRECT),
        ("/v2/models/basic/train//log", Purpose.REDIRECT),
        ("/v2/models/basic/train/x/log/", Purpose.NOT_FOUND),
        ("/v2/models/basic%2F", Purpose.NOT_FOUND),
    ],
)
def test_empty_path_segments_name_no_model(target: str, purpose: Purpose) -> None:
    assert route_of(target).purpose is purpose
    assert not route_of(target).name


@given(
    st.lists(
        st.sampled_from(
            ["/", "//", "v2", "models", "basic", "train", "predict", "été", "%2F", "%", "%00", "..", "\\", "x", "log"]
        ),
        max_size=12,
    ).map("".join)
    | st.text(st.characters(codec="latin-1")),
    st.sampled_from(["GET", "POST", "DELETE", "HEAD", "X"]),
    st.sampled_from(["", "/base"]),
)
def test_any_target_has_a_purpose_and_redirects_stay_on_the_host(target: str, method: str, base: str) -> None:
    place = DeepaasPaths(NAMES, base).find(method.encode(), target.encode("utf-8", "replace"), b"")

    assert not place.name or place.name in NAMES
    if place.purpose is Purpose.REDIRECT:
        assert place.location.startswith("/")
        assert not place.location.startswith("//")
        again = DeepaasPaths(NAMES, base).find(method.encode(), place.location.encode("latin-1"), b"")
        assert again.purpose is not Purpose.REDIRECT
