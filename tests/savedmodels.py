"""SavedModels for tests: one process imports TensorFlow and writes all that are requested.

The `savedmodels` fixture (tests/conftest.py) is a folder with all of NAMES, built once per session: `savedmodels /
"iris"` is a SavedModel, to be copied with `install` if a test needs it in a repository. savedmodel_builders.py says
what each one does. TensorFlow is imported in that process only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTRACT = ("rows", "free", "scalar", "strings", "optional", "turns", "picky")
"""The models of contract.MODELS."""
NAMES = (
    *(f"contract_{name}" for name in CONTRACT),
    "iris",
    "iris_keys",
    "left_right",
    "special_keys",
    "keras",
    "keras_saved",
    "module",
    "compiled",
    "mlp",
    "references",
    "image",
    "image_fixed",
    "module_fixed",
    "flattens_one",
    "sums_rows",
    "upper",
    "lookup",
    "types",
    "asserts",
    "scalar_output",
    "mixed",
    "order",
    "aliases",
    "unranked",
    "complex_input",
    "complex_output",
    "sparse_input",
    "sparse_output",
    "tags",
    "hungry",
    "counter",
    "accumulator",
    "remembers",
    "ragged",
    "no_variables",
    "corrupt",
    "empty_folder",
)
WIDE = "wide"
"""An MLP 512-2048-2048-512 in FP32, 25 MB, for which batching pays. Built only when named."""
PATIENCE_S = 180
BUILT = "PENSTOCK_TEST_SAVEDMODELS"
"""The environment variable with a folder that already contains them."""


def build(folder: Path, *names: str) -> Path:
    """Write the SavedModels of these names (none: all of NAMES) as `folder/<name>`; return `folder`."""
    selected = names or NAMES
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": "-1"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.savedmodel_builders", str(folder), *selected],
        cwd=ROOT,
        env=os.environ | quiet,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(ended.stderr[-4000:])
    return folder


def install(savedmodel: Path, version: Path, *, triton: bool = True) -> Path:
    """Copy a SavedModel into a version folder: in Triton's layout (`model.savedmodel`), or as that folder itself."""
    target = version / "model.savedmodel" if triton else version
    return shutil.copytree(savedmodel, target, dirs_exist_ok=True)
