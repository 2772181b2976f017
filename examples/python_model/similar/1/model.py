"""How alike two words are: logic that is no graph, as Triton's `model.py`."""

import difflib

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        # Instead of a config.pbtxt
        config.set_max_batch_size(64)
        for name in ("left", "right"):
            config.add_input({"name": name, "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "ratio", "data_type": "TYPE_FP32", "dims": [1]})
        return config

    def execute(self, requests):
        responses = []
        for request in requests:
            left = pb_utils.get_input_tensor_by_name(request, "left").as_numpy()
            right = pb_utils.get_input_tensor_by_name(request, "right").as_numpy()
            ratios = [
                difflib.SequenceMatcher(None, one.decode(), other.decode()).ratio()
                for one, other in zip(left.ravel(), right.ravel(), strict=True)
            ]
            output = pb_utils.Tensor("ratio", np.array(ratios, np.float32).reshape(-1, 1))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
