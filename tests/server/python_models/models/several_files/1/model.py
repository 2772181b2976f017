import beside
import numpy as np
import triton_python_backend_utils as pb_utils

from . import beside as relative


class TritonPythonModel:
    def execute(self, requests):
        assert beside.ANSWER == relative.ANSWER
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([beside.ANSWER], np.int32))]) for _ in requests
        ]
