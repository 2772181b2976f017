import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.types = [
            pb_utils.triton_string_to_numpy(pb_utils.get_output_config_by_name(config, name)["data_type"])
            for name in ("OUTPUT0", "OUTPUT1")
        ]

    def execute(self, requests):
        responses = []
        for request in requests:
            input0 = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            input1 = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            total = pb_utils.Tensor("OUTPUT0", (input0 + input1).astype(self.types[0]))
            difference = pb_utils.Tensor("OUTPUT1", (input0 - input1).astype(self.types[1]))
            responses.append(pb_utils.InferenceResponse(output_tensors=[total, difference]))
        return responses
