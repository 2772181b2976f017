"""OpenVINO under ONNX Runtime, on the CPU: its session, and what it does otherwise than ONNX Runtime's own operators.

Called by onnx.py, for a model that asks for it. Sources: ONNX Runtime's page on the provider, and how that of
onnxruntime-openvino 1.24.1 was seen to behave: docs/adr/0004-onnx-runtime-binding.md has what was tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import Code, InferError
from .onnx import OnnxBackend, opened, prepared, run_options, start
from .onnx_binding import OnnxBinding
from .onnx_providers import CPU, OPENVINO, check_built, why_not_started
from .signature import Signature

_LEAST, _MOST = -(2**31), 2**31 - 1
_ERRORS_ARE_RAISED = 4


def load_with_openvino(path: Path, options: Mapping[str, str]) -> OpenvinoBackend:
    """Load a model on the CPU, whose graph OpenVINO runs as far as it can, and ONNX Runtime the rest.

    Raises: InferError (UNSUPPORTED: the provider is not there, or does not start; else as `onnx.load`).
    """
    check_built(OPENVINO)
    model, made, freed = prepared(path, options)
    made.log_severity_level = _ERRORS_ARE_RAISED
    providers = [(OPENVINO, provider_options(made)), (CPU, {})]
    try:
        session = opened(path, lambda: start(model, made, providers))
    except InferError as error:
        raise InferError(error.code, f"with OpenVINO: {error.message}") from error
    if session.get_providers()[0] != OPENVINO:  # it is left out with a line on stderr
        raise InferError(Code.UNSUPPORTED, f"OpenVINO does not start: {why_not_started(OPENVINO)}")
    return OpenvinoBackend(session, options, freed)


def provider_options(made: Any) -> dict[str, str]:
    """Give the provider's options for a session of the options `made`.

    It has threads of its own, as many as the session is told. FP32 is said because OpenVINO, left alone, computes in
    BF16 on a CPU that has it.
    """
    return {"device_type": "CPU", "precision": "FP32", "num_of_threads": str(made.intra_op_num_threads)}


class OpenvinoBackend(OnnxBackend):
    """One session whose graph has been compiled by OpenVINO.

    An initializer is a constant there: what a caller gave for one would be ignored, so none is an input.
    """

    def __init__(self, session: Any, options: Mapping[str, str], freed: Any = ()) -> None:
        super().__init__(session, options, freed)
        fixed = {node.name for node in session.get_overridable_initializers()}
        inputs = tuple(spec for spec in self.graph.inputs if spec.name not in fixed)
        self.graph = Signature(inputs, self.graph.outputs)

    def _make(self, signature: Signature, capacity_rows: int) -> OnnxBinding:
        return OpenvinoBinding(self._session, self.graph, signature, capacity_rows, run_options(self._options))


class OpenvinoBinding(OnnxBinding):
    """A Binding that refuses what OpenVINO would silently compute with other numbers: it has INT64 in 32 bits."""

    def __init__(
        self, session: Any, graph: Signature, signature: Signature, capacity_rows: int, run_options: Any
    ) -> None:
        super().__init__(session, graph, signature, capacity_rows, run_options)
        self._wide = [position for position, (_, graph) in enumerate(self._inputs) if graph.datatype == "INT64"]

    def run(self, wanted: Sequence[int]) -> list[Any]:
        """Run the model on what was lent. Raises: InferError (INVALID), besides, for an integer that does not fit."""
        for position in self._wide:
            buffer = self._lent.buffers[position] if self._lent is not None else None
            if buffer is None or not buffer.size:
                continue
            least, most = int(buffer.min()), int(buffer.max())
            if least < _LEAST or most > _MOST:
                found = most if most > _MOST else least
                text = f"input '{self._inputs[position][0].name}' has {found}"
                text += ", and OpenVINO computes INT64 in 32 bits: the model would have to run without it"
                raise InferError(Code.INVALID, text)
        return super().run(wanted)
