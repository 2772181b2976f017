"""Write the ONNX models of the Cortex examples: the network of examples/iris, once with its outputs swapped.

Run `python examples/cortex/make_onnx.py`; it needs onnx (`make dev`). Handlers of Cortex's xgboost and scikit-learn
examples read the class first, those of its PyTorch and Keras examples the probabilities.
"""

from __future__ import annotations

from pathlib import Path

import onnx

HERE = Path(__file__).parent
TRAINED = HERE.parent / "iris" / "iris" / "1" / "model.onnx"
FOLDER = HERE / "s3" / "penstock-examples" / "iris"


def main() -> None:
    """Write both models."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    model = onnx.load(TRAINED)
    onnx.save(model, FOLDER / "label-first.onnx")
    swapped = list(reversed(model.graph.output))
    del model.graph.output[:]
    model.graph.output.extend(swapped)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, FOLDER / "probabilities-first.onnx")
    print(*(f"{path.name}: {path.stat().st_size} bytes" for path in sorted(FOLDER.glob("*.onnx"))), sep="\n")


if __name__ == "__main__":
    main()
