import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sends IN[0] as often as it says, the last one with the last mark; forgets the request when that is negative."""

    async def execute(self, requests):
        for request in requests:
            number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel()[0])
            if number > 1000:
                raise ValueError("too many")
            sender = request.get_response_sender()
            if number == 0:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            for index in range(number):
                last = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if index == number - 1 else 0
                answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))])
                sender.send(answer, last)
