import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Loads and unloads what the parameters say, and answers whether it is ready."""

    def initialize(self, args):
        self.was_ready = pb_utils.is_model_ready("other", "1")

    def execute(self, requests):
        responses = []
        for request in requests:
            parameters = json.loads(request.parameters())
            if parameters["do"] == "load":
                pb_utils.load_model(
                    parameters["model"],
                    parameters.get("config", ""),
                    parameters.get("config") and {"file:1/weights": b"123"},
                )
            elif parameters["do"] == "unload":
                pb_utils.unload_model(model_name=parameters["model"], unload_dependents=True)
            ready = pb_utils.is_model_ready(model_name=parameters["model"])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("READY", np.array([self.was_ready, ready]))]))
        return responses
