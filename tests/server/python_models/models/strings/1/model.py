import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Gives strings back, as text for those that are text."""

    def execute(self, requests):
        responses = []
        for request in requests:
            strings = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            assert all(isinstance(element, bytes) for element in strings.ravel())
            for index, element in enumerate(strings.flat):
                try:
                    strings.flat[index] = element.decode()
                except UnicodeDecodeError:
                    continue
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", strings)]))
        return responses
