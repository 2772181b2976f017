import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Gives its input back by way of DLPack, and once more by way of a capsule."""

    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            through = pb_utils.Tensor.from_dlpack("OUT", tensor)
            again = pb_utils.Tensor.from_dlpack("AGAIN", tensor.to_dlpack())
            responses.append(pb_utils.InferenceResponse(output_tensors=[through, again]))
        return responses
