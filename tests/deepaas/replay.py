"""What the original and ours are served from, and what counts of their answers. Runs on Python 3.10 too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.originals import Original

HERE = Path(__file__).parent
MODULES = HERE / "modules"
COMPILED = HERE.parents[1] / ".pytest_cache" / "compiled"
"""Where servers and commands keep compiled modules: beside none of those that they import, and from one to the next."""
_PROSE = ("summary", "description", "tags")


def shaped(case: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Leave what the original says in prose out of its swagger.json, and the order of its keys."""
    if not case["path"].endswith("/swagger.json") or answer.get("status") != 200 or "body" not in answer:
        return answer
    page = json.loads(answer["body"])
    for key in ("info", "externalDocs"):
        page.pop(key, None)
    for operations in page["paths"].values():
        for method, operation in operations.items():
            operations[method] = {name: value for name, value in operation.items() if name not in _PROSE}
            for response in operations[method]["responses"].values():
                response.pop("description", None)
    return {**answer, "body": json.dumps(page, sort_keys=True)}


ORIGINAL = Original(
    HERE / "cases",
    compared=("content-type", "allow", "location", "content-disposition", "www-authenticate"),
    usual={"content-type": "application/json; charset=utf-8"},
    masks=(
        (r"\b[0-9a-f]{32}\b(?<!0{32})(?<!89abcdef)", "<uuid>"),
        (r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\b", "<date>"),
        (r'"duration": "[^"]*"', '"duration": "<duration>"'),
        (r"""(filename(?:": "|='))/[^"']*""", r"\1<tmp>"),
        (r'"/(?:[^"/]+/)*tmp[^"/]*"', '"<tmp>"'),
        (r"data:image/png;base64,[\w+/=]+", "<picture>"),
    ),
    shaped=shaped,
)


def installed(server: Mapping[str, Any], folder: Path) -> None:
    """Install the models of a group into a folder, as a package would be, and write the group's files."""
    metadata = folder / "asked-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: asked\nVersion: 1.0\n")
    lines = [f"{name} = {point}" for name, point in server["models"].items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[deepaas.v2.model]", *lines, ""]))
    for name, text in server.get("files", {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def words_of(server: Mapping[str, Any], folder: Path) -> list[str]:
    """Give the arguments of a group's server."""
    return [word.replace("{folder}", str(folder)) for word in server["arguments"]]
