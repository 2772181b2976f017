"""URLs and methods, the page of the API, and what the options of deepaas-run change of them."""

from __future__ import annotations

import re

from tests.originals import RecordedRequest, get, post

from .definitions import group, predict

MODEL = {"basic": "basic"}
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "PURGE")
PATHS = {
    "root": "/",
    "v2": "/v2/",
    "models": "/v2/models/",
    "model": "/v2/models/basic/",
    "predict": "/v2/models/basic/predict/",
    "train": "/v2/models/basic/train/",
    "training": "/v2/models/basic/train/0123456789abcdef0123456789abcdef",
    "debug": "/v2/debug/",
    "ui": "/ui",
    "api": "/api",
    "swagger": "/swagger.json",
    "nope": "/v2/models/nope/",
}
UNREAD = ("GET-api", "GET-swagger", "POST-train")

SLASHES = [
    "/v2", "/v2/models", "/v2/models/basic", "/v2/models/basic/predict", "/v2/models/basic/train", "/v2/debug", "/api/",
    "/ui/", "/swagger.json/", "/v2/models/basic/train/x/", "/v2//", "//", "//v2/", "/v2//models/", "/v2/models//basic/",
    "/v2/models/basic//", "/v2//models", "/v2/models/nope", "/v2/models/nope/predict/", "/v2/models/nope/predict",
    "/v1/", "/v3/",
    "/v2/models/BASIC/", "/V2/models/", "/v2/models/%62asic/", "/v2/models/basic%2Fpredict/", "/v2/models/basic/?x=1",
    "/v2/models/basic?x=1&y=%20", "/v2/models/../models/", "/v2/./models/", "/v2/models/basic/other/", "/nothing",
    "/api/x",
    "/swagger.JSON", "/static/swagger/nothing.js", "/static/swagger/", "/static/", "/v2/models/basic/train/a%20b",
    "/v2/models/basic/train/a/b", "/v2/ping", "/v2/models/b%C3%A9/", "/v2/models/basic;x=1/", "/docs", "/redoc",
    "/openapi.json",
    "/metrics", "/health", "/v2/health/ready", "/favicon.ico", "/ui?x=1", "/v2/models/basic/predict/extra",
]  # fmt: skip


def every(paths: dict[str, str] = PATHS, methods: tuple[str, ...] = METHODS) -> list[RecordedRequest]:
    """Ask each of the paths in each way."""
    return [
        get(f"{method}-{name}", path, method, unread=f"{method}-{name}" in UNREAD)
        for name, path in paths.items()
        for method in methods
    ]


def requests_at(base: str = "", model: str = "basic") -> list[RecordedRequest]:
    """Ask what every server answers."""
    return [
        get("versions", f"{base}/"),
        get("versions-without-slash", base or "/"),
        get("version", f"{base}/v2/"),
        get("version-without-slash", f"{base}/v2"),
        get("models", f"{base}/v2/models/"),
        get("models-without-slash", f"{base}/v2/models"),
        get("model", f"{base}/v2/models/{model}/"),
        post("predict", f"{base}/v2/models/{model}/predict/"),
        post("predict-without-slash", f"{base}/v2/models/{model}/predict?num=5"),
        get("predict-got", f"{base}/v2/models/{model}/predict/"),
        get("trainings", f"{base}/v2/models/{model}/train/"),
        get("trainings-without-slash", f"{base}/v2/models/{model}/train"),
        post("train", f"{base}/v2/models/{model}/train/"),
        get("training", f"{base}/v2/models/{model}/train/x"),
        get("training-ended", f"{base}/v2/models/{model}/train/x", "DELETE"),
        get("debug", f"{base}/v2/debug/", unread=True),
        get("debug-without-slash", f"{base}/v2/debug"),
        get("api", f"{base}/api", unread=True),
        get("ui", f"{base}/ui"),
        get("swagger", f"{base}/swagger.json"),
        get("at-the-root", "/v2/"),
        get("at-the-root-swagger", "/swagger.json", unread=True),
    ]


def sized(size: int) -> list[RecordedRequest]:
    """Ask with bodies about as large as may be."""
    big = b"x" * (size + 1)
    form = b'--edge\r\nContent-Disposition: form-data; name="arg1"\r\n\r\n%s\r\n--edge--\r\n'
    return [
        predict("json-at-the-limit", "basic", value=(b'{"arg1": "' + b"x" * (size - 12) + b'"}')),
        predict("json-one-more", "basic", value=(b'{"arg1": "' + b"x" * (size - 11) + b'"}')),
        predict("urlencoded-large", "basic", value=b"arg1=" + big, kind="application/x-www-form-urlencoded"),
        predict("form-large", "basic", value=form % big, kind="multipart/form-data; boundary=edge"),
        predict("form-small", "basic", value=form % b"x", kind="multipart/form-data; boundary=edge"),
        predict("unread-large", "basic", value=big, kind="text/plain"),
        predict("file-large", "basic", kind="multipart/form-data; boundary=edge", value=(
            b'--edge\r\nContent-Disposition: form-data; name="data"; filename="f"\r\n\r\n' + big
            + b"\r\n--edge--\r\n")),
        predict("still-there", "basic"),
    ]  # fmt: skip


INI = "[DEFAULT]\nlisten_ip = 127.0.0.1\ntrain_endpoint = false\ndoc_endpoint = no\nclient_max_size = 300\n"
NAMES = {"basic": "basic", "empty": "empty", "a-b.c_d": "basic", "Up": "forms:bare"}
GROUPS = [
    group("methods", every(), models=MODEL),
    group("slashes", [get(f"at{path}", path) for path in SLASHES], models=MODEL),
    group("slashes-posted", [post(f"at{path}", path) for path in SLASHES if not re.search("train|openapi", path)],
          models=MODEL),
    group("based", requests_at("/some/base"), "--base-path", "/some/base", models=MODEL),
    group("based-with-a-slash", requests_at("/base"), "--base-path", "/base/", models=MODEL),
    group("based-at-the-root", requests_at(), "--base-path", "/", models=MODEL),
    group("no-train", [*requests_at(), *every({"training": PATHS["training"], "train": PATHS["train"]})],
          "--notrain-endpoint", models=MODEL),
    group("no-predict", [*requests_at(), *every({"predict": PATHS["predict"]})], "--nopredict-endpoint", models=MODEL),
    group("no-doc", requests_at(), "--nodoc-endpoint", models=MODEL),
    group("debug", requests_at(), "--debug-endpoint", models=MODEL),
    group("sized", sized(300), "--client-max-size", "300", models=MODEL),
    group("sized-by-the-environment", sized(300), models=MODEL, environment={"OS_DEFAULT__CLIENT_MAX_SIZE": "300"}),
    group("by-a-file", requests_at(), "--config-file", "{folder}/it.ini", models=MODEL, files={"it.ini": INI}),
    group("by-a-folder", requests_at(), "--config-dir", "{folder}/d", models=MODEL,
          files={"d/a.conf": INI, "d/b.conf": "[DEFAULT]\ntrain_endpoint = true\n",
              "d/c.ini": "[DEFAULT]\npredict_endpoint = false\n"}),
    group("by-a-file-and-a-flag", requests_at(), "--config-file", "{folder}/it.ini", "--train-endpoint", models=MODEL,
          files={"it.ini": INI}),
    group("by-a-file-and-the-environment", requests_at("/env"), "--config-file", "{folder}/it.ini", models=MODEL,
          files={"it.ini": INI}, environment={"OS_DEFAULT__TRAIN_ENDPOINT": "true", "OS_DEFAULT__BASE_PATH": "/env"}),
    group("several", [
        get("models", "/v2/models/"), get("swagger", "/swagger.json"),
        *(get(f"model-{name}", f"/v2/models/{name}/") for name in NAMES),
        *(predict(f"predict-{name}", name) for name in NAMES),
        *(post(f"train-{name}", f"/v2/models/{name}/train/", unread=True) for name in NAMES),
    ], models=NAMES),
    group("one-by-name", requests_at(), "--model-name", "basic", models=NAMES),
    group("one-by-the-environment", requests_at(model="a-b.c_d"), models=NAMES,
          environment={"DEEPAAS_V2_MODEL": "a-b.c_d"}),
    group("workers", [predict(f"asked-{time}", "basic") for time in range(4)], "-p", "2", models=MODEL),
    group("unwarmed", [predict("asked", "whole", "?a-hyphen=2")], "--nowarm", models={"whole": "forms:whole"}),
]  # fmt: skip
