"""Arguments looked for in one place only; such as must be there; and files."""

from __future__ import annotations

from tests.originals import FORM, get, post

from .definitions import RecordedRequest, form, group, parts, predict, urlencoded

ALL = [
    "anywhere",
    "many",
    "in-query",
    "in-querystring",
    "in-form",
    "in-json",
    "in-headers",
    "X-Named",
    "in-cookies",
    "renamed",
    "X-Renamed",
    "many-query",
    "many-form",
]
ALL += ["many-json", "many-headers", "many-cookies"]
PLACES: list[RecordedRequest] = [
    predict("in-the-query", "places", "?" + "&".join(f"{name}=1" for name in ALL)),
    predict("in-the-query-twice", "places", "?" + "&".join(f"{name}=1&{name}=2" for name in ALL)),
    urlencoded("in-a-form", "places", "&".join(f"{name}=1" for name in ALL)),
    urlencoded("in-a-form-twice", "places", "&".join(f"{name}=1&{name}=2" for name in ALL)),
    form("in-parts", "places", *((name, "1") for name in ALL)),
    predict("in-json", "places", value=dict.fromkeys(ALL, "1")),
    predict("in-json-lists", "places", value={name: ["1", "2"] for name in ALL}),
    predict("in-headers", "places", headers=dict.fromkeys(ALL, "1")),
    predict("in-headers-of-other-letters", "places", headers={name.upper(): "1" for name in ALL if "-" in name}),
    predict("in-headers-bad", "places", headers={"X-Named": "x", "checked-header": "c"}),
    predict("in-cookies", "places", headers={"Cookie": "; ".join(f"{name}=1" for name in ALL)}),
    predict("in-cookies-quoted", "places", headers={"Cookie": 'in-cookies="a b"; many-cookies=c%20d'}),
    predict(
        "in-cookies-twice", "places", headers={"Cookie": "in-cookies=1; in-cookies=2; many-cookies=1; many-cookies=2"}
    ),
    predict("in-cookies-nonsense", "places", headers={"Cookie": ";;=;a b;in-cookies"}),
    predict("header-accents", "places", headers={"in-headers": "h\u00e9"}),
    predict("header-empty", "places", headers={"in-headers": "", "X-Named": ""}),
    predict("header-with-commas", "places", headers={"many-headers": "a, b"}),
    predict("query-form-json", "places", "?anywhere=query", {"anywhere": "json", "in-json": {"a": [1]}}),
    form("query-and-form", "places", ("anywhere", "form"), query="?many=1&many=2"),
    predict("list-of-json", "places", value={"many": "one"}),
    predict("json-null-everywhere", "places", value={"anywhere": None, "in-json": None}),
    predict("json-list-body", "places", value=[1]),
    get("swagger", "/swagger.json"),
]
FULL = {"must": 1, "must-too": "a", "null": None, "list": ["x"]}
NEEDED: list[RecordedRequest] = [
    predict("nothing", "needed"),
    predict("all", "needed", value=FULL),
    *(predict(f"without-{name}", "needed", value={key: FULL[key] for key in FULL if key != name}) for name in FULL),
    *(predict(f"null-{name}", "needed", value={**FULL, name: None}) for name in
      ("must", "must-too", "list", "plain", "default-null", "default", "default-of-another-type", "default-list")),
    predict("given", "needed", value={**FULL, "plain": 2, "default": 6, "default-list": [3], "default-null": 7}),
    predict("blank", "needed", "?must=&must-too=&null=&list="),
    predict("in-query", "needed", "?must=1&must-too=b&null=2&list=x&list=y"),
    post("train-nothing", "/v2/models/needed/train/"),
    post("train-bad", "/v2/models/needed/train/", {"must": "x", "list": "y", "null": None}),
    get("swagger", "/swagger.json"),
]  # fmt: skip

FILE = ("must", "of the file", "f.txt", "text/plain")
FILES: list[RecordedRequest] = [
    form("one", "files", FILE),
    form("both", "files", FILE, ("one", b"\x00\xff", "b.bin", "application/octet-stream"), ("text", "t")),
    form("list", "files", FILE, ("listed", "a", "a.txt", "text/plain"), ("listed", "b", "b.txt", "text/plain")),
    form("anywhere", "files", FILE, ("anywhere", "a", "a.txt", "text/plain")),
    form("text-for-a-file", "files", ("must", "text")),
    form("file-for-a-text", "files", FILE, ("text", "a", "a.txt", "text/plain")),
    form("twice", "files", FILE, ("must", "second", "g.txt", "text/csv")),
    form("empty", "files", ("must", "", "f.txt", "text/plain")),
    form("empty-name", "files", ("must", "content", "", "text/plain")),
    form("no-type", "files", ("must", "content", "f.txt")),
    form("no-type-known-extension", "files", ("must", "content", "f.png")),
    form("no-type-no-extension", "files", ("must", "content", "f")),
    form("typed-with-parameters", "files", ("must", "content", "f.txt", "text/plain; charset=utf-8")),
    form("name-accents", "files", ("must", "content", "é世.txt", "text/plain")),
    form("name-path", "files", ("must", "content", "../a/b.txt", "text/plain")),
    form("name-windows", "files", ("must", "content", "C:\\a\\b.txt", "text/plain")),
    form("name-spaces", "files", ("must", "content", "a b.tar.gz", "application/gzip")),
    form("name-percent", "files", ("must", "content", "a%20b%22.txt", "text/plain")),
    form("binary", "files", ("must", bytes(range(256)) * 16, "f.bin", "application/octet-stream")),
    form("large", "files", ("must", b"0123456789" * 10_000, "f.bin", "application/octet-stream")),
    form("boundary-inside", "files", ("must", "a\r\n--edg\r\n--edgeless", "f.txt", "text/plain")),
    form("none", "files", ("one", "a", "a.txt", "text/plain")),
    predict("in-query", "files", "?must=q"),
    predict("in-json", "files", value={"must": "j"}),
    urlencoded("in-a-form", "files", "must=text&listed=a&listed=b"),
    predict("extended-name", "files", value=parts(
        "--edge\nContent-Disposition: form-data; name=\"must\"; filename*=UTF-8''%C3%A9.txt\n\nx\n--edge--\n"),
        kind=FORM),
    predict("both-names", "files", value=parts(
        "--edge\nContent-Disposition: form-data; name=\"must\"; filename=\"e.txt\"; filename*=UTF-8''%C3%A9.txt\n\n"
        "x\n--edge--\n"),
        kind=FORM),
    predict("unquoted-names", "files", value=parts(
        "--edge\nContent-Disposition: form-data; name=must; filename=f.txt\n\nx\n--edge--\n"), kind=FORM),
    predict("escaped-name", "files", value=parts(
        '--edge\nContent-Disposition: form-data; name="must"; filename="a\\"b.txt"\n\nx\n--edge--\n'), kind=FORM),
    predict("base64", "files", value=parts(
        '--edge\nContent-Disposition: form-data; name="must"; filename="f"\nContent-Transfer-Encoding: base64\n\n'
        "aGk=\n--edge--\n"),
        kind=FORM),
    predict("gzipped-part", "files", value=parts(
        '--edge\nContent-Disposition: form-data; name="must"; filename="f"\nContent-Encoding: gzip\n\nx\n--edge--\n'),
            kind=FORM),
    predict("cut", "files", value=parts(
        '--edge\nContent-Disposition: form-data; name="must"; filename="f.txt"\n\ncut'), kind=FORM),
    get("swagger", "/swagger.json"),
]  # fmt: skip
GROUPS = [
    group("places", PLACES, models={"places": "places"}),
    group("needed", NEEDED, models={"needed": "needed"}),
    group("files", FILES, models={"files": "files"}),
]
