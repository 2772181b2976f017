"""The examples of the platform's page that need libraries, as printed there; the others are in scenarios/served.py."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.abeja.scenarios.definitions import HANDLERS
from tests.abeja.serving import COMMAND, environment, serving
from tests.forking import the_forker
from tests.originals import bytes_of, post

Image = pytest.importorskip("PIL.Image")
SIZE = (24, 16)
MAKE_MODEL = """
import keras
layers = [keras.layers.Input((16, 24, 3)), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(2)]
model = keras.Sequential(layers)
model.layers[-1].set_weights([keras.ops.zeros((3, 2)).numpy(), keras.ops.array([0.85, 0.15]).numpy()])
model.save({path!r})
"""

WITHIN_S = 300  # TensorFlow is imported

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for module in ("seed_flip.py", "seed_predict.py"):
        shutil.copy(HANDLERS / module, tmp_path / "main.py" if module == "seed_predict.py" else tmp_path)
    (tmp_path / "cat.jpg").write_bytes(cat())
    return tmp_path


def cat() -> bytes:
    """Give an image whose left half is dark."""
    dark = np.zeros((SIZE[1], SIZE[0], 3), np.uint8)
    dark[:, SIZE[0] // 2 :] = 240
    written = io.BytesIO()
    Image.fromarray(dark).save(written, format="JPEG")
    return written.getvalue()


def sides(jpeg: bytes) -> list[bool]:
    """Tell whether the left and the right side of an image are dark."""
    shown: Any = np.asarray(Image.open(io.BytesIO(jpeg)))
    assert shown.shape == (SIZE[1], SIZE[0], 3)
    return [bool(shown[:, column].mean() < 128) for column in (2, -3)]


def run_local(folder: Path, handler: str, *words: str) -> bytes:
    """Run the command of the page. Returns: its output."""
    command = [*COMMAND, "model", "run-local", "-h", handler, "-i", "abeja/all-cpu:19.04", "--input", "cat.jpg", *words]
    done = the_forker().run(command, cwd=folder, env=environment({}), timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr.decode()
    printed: bytes = done.stdout
    return printed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a trained model."""
    if find_spec("tensorflow") is None:  # not imported here, for the sake of other tests in this process
        pytest.skip("needs TensorFlow")
    path = tmp_path_factory.mktemp("training") / "model.h5"
    training = subprocess.run(
        [sys.executable, "-c", MAKE_MODEL.format(path=str(path))], capture_output=True, check=False, timeout=WITHIN_S
    )
    assert path.exists(), training.stderr.decode()
    return path


def test_run_local_flips_an_image(folder: Path) -> None:
    pytest.importorskip("cv2")

    flipped = run_local(folder, "seed_flip:handler", "--quiet")

    assert sides((folder / "cat.jpg").read_bytes()) == [True, False]
    assert sides(flipped) == [False, True]


def test_an_image_is_flipped_over_http(folder: Path) -> None:
    pytest.importorskip("cv2")
    case = post("flip", "/", cat(), "image/jpeg").written()

    with serving("--handler=seed_flip:handler", folder=folder) as served:
        answer = served.player.play(case)

    assert (answer["status"], answer["headers"]["content-type"]) == (200, "image/jpeg")
    assert sides(bytes_of(answer, "body")) == [False, True]


def test_run_local_uses_a_trained_model(folder: Path, model: Path) -> None:
    shutil.copy(model, folder)

    printed = run_local(folder, "main:handler", "--environment", "ABEJA_TRAINING_RESULT_DIR:.", "--quiet")

    expected = {"result": [{"label": "cat", "probability": "0.85"}, {"label": "dog", "probability": "0.15"}]}
    assert printed.decode() == json.dumps(expected, indent=4) + "\n"


def test_a_trained_model_is_found_in_the_training_result_folder(folder: Path, model: Path) -> None:
    (folder / "abejainc_training_result").mkdir()
    shutil.copy(model, folder / "abejainc_training_result")
    case = post("predict", "/", cat(), "image/jpeg").written()

    with serving(folder=folder) as served:
        answer = served.player.play(case)

    assert json.loads(answer["body"])["result"][0] == {"label": "cat", "probability": "0.85"}
