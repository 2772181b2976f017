import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Wants to be given its requests again."""

    def execute(self, requests):
        for request in requests:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        answers = "answers" in requests[0].parameters()
        return [pb_utils.InferenceResponse() if answers else None for _ in requests]
