"""Requests for metadata."""

from __future__ import annotations

from .definitions import Group, get, predict, rpc, words

DESCRIBED = [
    get("rest", "/metadata"),
    get("longer-path", "/api/v1.0/metadata"),
    rpc("rpc", "Model/Metadata", {}),
    rpc("rpc-seldon", "Seldon/ModelMetadata", {"name": "x"}),
    predict("still-predicts", {"data": {"ndarray": [[1]]}}),
]
KINDS = words(
    "versions-text not-a-dict null extra-key seldon-kinds v2-kinds bad-datatype bad-shape float-shape bad-custom "
    "text-schema"
)
IMAGE = {"PREDICTIVE_UNIT_IMAGE": "reg.io:5000/org/img:0.3"}


def metadata_group(kind: str, **environment: str) -> Group:
    """Describe a component in one way."""
    arguments = ["--parameters", '[{"name":"say","value":"%s","type":"STRING"}]' % kind]  # noqa: UP031 - braces
    return Group(f"described-{kind}", "described.Describing", DESCRIBED, environment, arguments)


GROUPS = [
    *(metadata_group(kind) for kind in KINDS),
    Group("described-by-nothing", "described.DescribedByNothing", DESCRIBED),
    Group("described-by-an-image", "described.DescribedByNothing", DESCRIBED, IMAGE),
    Group(
        "described-by-the-environment",
        "seeds.WithMetadata.Model",
        DESCRIBED,
        {
            "MODEL_METADATA": "name: from-the-environment\nversions: [e1]\ncustom: {a: b}",
            **IMAGE,
        },
    ),
    Group(
        "described-badly-by-the-environment", "seeds.WithMetadata.Model", DESCRIBED, {"MODEL_METADATA": "{ bad: [yaml"}
    ),
    Group("described-wrongly-by-the-environment", "plain.Ident", DESCRIBED, {"MODEL_METADATA": "versions: v1"}),
]
