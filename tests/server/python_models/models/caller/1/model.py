import asyncio
import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Asks the model that the parameter `model` names, as the parameter `do` says."""

    def initialize(self, args):
        try:
            pb_utils.InferenceRequest(model_name="x", requested_output_names=[], inputs=[]).exec()
        except pb_utils.TritonModelException as error:
            self.too_early = str(error)

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        parameters = json.loads(request.parameters())
        if parameters["do"] == "early":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(self.too_early))
        call = pb_utils.InferenceRequest(
            request_id=request.request_id(), model_name=parameters["model"], requested_output_names=["OUT"],
            inputs=request.inputs(), correlation_id=request.correlation_id(), flags=request.flags(), timeout=parameters.get("within_us", 5_000_000),
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU), trace=request.trace(),
            parameters={"from": "caller"},
        )  # fmt: skip
        return self.answer(getattr(self, parameters["do"])(call))

    def answer(self, responses):
        tensors = []
        for response in responses:
            if response.has_error():
                if self.of_mine(response):
                    return response
                return pb_utils.InferenceResponse(
                    error=pb_utils.TritonError("called: " + response.error().message(), response.error().code())
                )
            if response.output_tensors():
                tensors.append(pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy())
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.concatenate(tensors))])

    def of_mine(self, response):
        return response.error().message() == "given up"

    def exec(self, call):
        return [call.exec()]

    def threads(self, call):
        responses = []
        threads = [threading.Thread(target=lambda: responses.append(call.exec())) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return responses

    def streamed(self, call):
        responses = call.exec(decoupled=True)
        first = list(responses)
        assert [id(response) for response in responses] == [id(response) for response in first]
        return first

    def first_only(self, call):
        return [next(iter(call.exec(decoupled=True)))]

    def given_up(self, call):
        async def both():
            awaited = call.async_exec()
            awaited.cancel()
            await asyncio.wait([awaited])

        asyncio.run(both())
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("given up"))]

    def gathered(self, call):
        async def both():
            one, several = await asyncio.gather(call.async_exec(), call.async_exec(decoupled=True))
            return [one, *several]

        return asyncio.run(both())
