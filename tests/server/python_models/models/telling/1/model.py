import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Tells what it sees of a request, as JSON."""

    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        responses = []
        for request in requests:
            properties = {
                "id": request.request_id(),
                "correlation": request.correlation_id(),
                "flags": request.flags(),
                "start": bool(request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
                "end": bool(request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
                "timeout": request.timeout(),
                "parameters": json.loads(request.parameters()),
                "outputs": sorted(request.requested_output_names()),
                "cancelled": request.is_cancelled(),
                "trace": request.trace().get_context(),
                "inputs": [
                    [tensor.name(), tensor.triton_dtype(), tensor.shape(), tensor.is_cpu()]
                    for tensor in request.inputs()
                ],
                "dir": pb_utils.get_model_dir(),
                "args": {key: self.args[key] for key in self.args if key != "model_config"},
            }
            text = np.array([json.dumps(properties)], dtype=np.object_)
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", text)], parameters={"seen": True, "count": 1})
            )
        return responses
