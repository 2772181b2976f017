import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Asks `identity` three times at once, and sums up."""

    async def execute(self, requests):
        responses = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="identity", requested_output_names=["OUT"], inputs=request.inputs()
            )
            answers = await asyncio.gather(*[call.async_exec() for _ in range(3)])
            total = sum(pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy() for answer in answers)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.asarray(total))]))
        return responses
