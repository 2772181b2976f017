"""Requests to handlers that return contents, tables, status codes, types and headers."""

from __future__ import annotations

from .definitions import by_name, group, table

JSON_TOO = [
    "text", "text-japanese", "none", "integer", "true", "float-nan", "dict", "dict-empty", "dict-japanese", "numpy",
    "list-of-dicts", "list-of-pairs", "list-of-integers", "list-empty", "bytes-io", "bytes", "generator-of-dicts",
    "tuple", "object", "numpy-bool", "array",
]  # fmt: skip
KINDS = ["-with-a-charset", "-in-capitals", "-with-spaces", "-of-tabs", "-of-another-csv"]

GROUPS = [
    group("contents", "contents:plain", by_name(table("contents", "CONTENTS"))),
    group("contents-as-json", "contents:as_json", by_name(JSON_TOO)),
    group(
        "tables",
        "tables:handler",
        [
            *by_name(table("tables", "TABLES")),
            *by_name([f"{name}/{kind}" for name in ("dicts", "quotes") for kind in KINDS]),
        ],
    ),
    group("replies", "replies:handler", by_name(table("replies", "REPLIES"))),
    *(
        group(f"poison-{name}", "replies:handler", by_name([name, "return-content"]))
        for name in table("replies", "POISON")
    ),
    group("broken", "replies:handler", by_name(table("replies", "BROKEN"), silent=True)),
]
