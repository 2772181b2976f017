"""What the seed's own examples answer."""

from __future__ import annotations

from tests.originals import get, post

from .definitions import encoded, form, group, predict

ARGUMENTS = [
    get("metadata", "/v2/models/my_model/"),
    predict("default-outside-the-choices", "my_model"),
    predict("given", "my_model", "?arg1=choice2"),
    post("train", "/v2/models/my_model/train/?arg1=choice1", keep={"UUID": r'"uuid": "(\w+)"'}),
    get("trained", "/v2/models/my_model/train/{UUID}", until='"status": "done"'),
    get("swagger", "/swagger.json"),
]
FILE = [
    predict("none", "my_model"),
    form("sent", "my_model", ("data", "to infer", "input.txt", "text/plain")),
    get("swagger", "/swagger.json"),
]
URL = [
    predict("none", "my_model"),
    predict("given", "my_model", encoded(url="https://example.com/a.png")),
    predict("bad", "my_model", "?url=nonsense"),
]
ACCEPT = [
    predict("none", "my_model"),
    *(
        predict(kind, "my_model", encoded(accept=kind))
        for kind in ("application/zip", "image/png", "application/json", "*/*", "text/html")
    ),
    predict("in-the-header", "my_model", headers={"Accept": "application/json"}),
    form("in-a-form", "my_model", ("accept", "image/png")),
    get("swagger", "/swagger.json"),
]
CHECKED = [predict("good", "my_model"), get("swagger", "/swagger.json")]
GROUPS = [
    group("seed-arguments", ARGUMENTS, models={"my_model": "seed_arguments"}),
    group("seed-file", FILE, models={"my_model": "seed_file"}),
    group("seed-url", URL, models={"my_model": "seed_url"}),
    group("seed-accept", ACCEPT, models={"my_model": "seed_accept"}),
    group("seed-schema-of-a-dict", CHECKED, models={"my_model": "seed_schemas:OfADict"}),
    group("seed-schema-of-a-class", CHECKED, models={"my_model": "seed_schemas:OfAClass"}),
]
