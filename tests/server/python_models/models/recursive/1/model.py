import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Asks itself for one less until there is nothing left, and counts the steps."""

    def execute(self, requests):
        return [self.one(int(request.inputs()[0].as_numpy()[0])) for request in requests]

    def one(self, depth):
        if depth == 0:
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([0], np.int32))])
        call = pb_utils.InferenceRequest(
            model_name="recursive",
            requested_output_names=["OUT"],
            inputs=[pb_utils.Tensor("IN", np.array([depth - 1], np.int32))],
        )
        answer = call.exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        steps = pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy() + 1
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", steps)])
