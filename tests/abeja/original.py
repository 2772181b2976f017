"""The platform's proxy 2.6.5 with its runtime 1.1.1: which parts of their answers are compared."""

from __future__ import annotations

import re

from tests.originals import Original

from .scenarios.definitions import HANDLERS

ORIGINAL = Original(
    cases=HANDLERS.with_name("cases"),
    compared=(
        "content-type", "location", "retry-after", "set-cookie", "etag", "www-authenticate", "x-one", "x-two", "x_one",
        "n", "1", "x-evil", "x-abeja-sys-meta-proxy-version", "x-abeja-sys-meta-runtime-version", "x-abeja-model-id",
        "x-abeja-model-version", "x-abeja-deployment-id", "x-abeja-service-id",
    ),
    usual={
        "content-type": "text/plain",
        "x-abeja-sys-meta-proxy-version": "2.6.5",
        "x-abeja-sys-meta-runtime-version": "1.1.1",
    },
    masks=((re.escape(str(HANDLERS)), "FOLDER"), (r"Date: [^\r]+", "Date: D")),
)  # fmt: skip
