import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Gives each input back: IN as OUT, IN1 as OUT1."""

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(tensor.name().replace("IN", "OUT"), tensor.as_numpy()) for tensor in request.inputs()]
            )
            for request in requests
        ]
