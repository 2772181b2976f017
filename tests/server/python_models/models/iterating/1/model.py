import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Counts down from what it is given, one answer in each execution, by the sender of the first if `keeps` is said."""

    def initialize(self, args):
        self.senders = {}

    def execute(self, requests):
        for request in requests:
            number = request.correlation_id()
            remaining = self.senders[number][1] if number in self.senders else int(request.inputs()[0].as_numpy()[0])
            sender = self.senders[number][0] if number in self.senders else request.get_response_sender()
            if "keeps" not in request.parameters():
                sender = request.get_response_sender()
            self.senders[number] = sender, remaining - 1
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([remaining]))])
            sender.send(answer, flags=0 if remaining > 1 else FINAL)
            if "keeps" not in request.parameters():
                self.senders[number] = None, remaining - 1
