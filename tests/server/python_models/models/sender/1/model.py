import json

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Answers by its sender, in the way that the parameter `do` says, and by the text of the error that this gives."""

    def execute(self, requests):
        responses = []
        for request in requests:
            do = json.loads(request.parameters())["do"]
            sender = request.get_response_sender()
            good = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([do.encode()], np.object_))])
            try:
                returned = getattr(self, do.replace(" ", "_"))(sender, good)
            except pb_utils.TritonModelException as error:
                returned = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
                if sender_closed(error):
                    returned = None
            responses.append(returned)
        return responses

    def send(self, sender, good):
        sender.send(good, FINAL)

    def send_in_two(self, sender, good):
        sender.send(good)
        sender.send(flags=FINAL)

    def send_twice(self, sender, good):
        sender.send(good)
        sender.send(good)

    def send_and_return(self, sender, good):
        sender.send(good, FINAL)
        return good

    def final_first(self, sender, good):
        sender.send(flags=FINAL)

    def nothing(self, sender, good):
        sender.send()

    def flag(self, sender, good):
        sender.send(good, 7)

    def return_it(self, sender, good):
        return good

    def forget(self, sender, good):
        return None


def sender_closed(error):
    return "closed" in str(error)
