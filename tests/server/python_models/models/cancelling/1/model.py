import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """0: sends one answer, and no more until the request is cancelled. 1: sends whether one has been, once it has."""

    def initialize(self, args):
        self.cancelled = threading.Event()

    def execute(self, requests):
        for request in requests:
            asks = bool(request.inputs()[0].as_numpy()[0])
            run = self.report if asks else self.wait
            threading.Thread(target=run, args=(request.get_response_sender(),)).start()

    def wait(self, sender):
        sender.send(answer(0))
        tick = threading.Event()
        while not sender.is_cancelled():
            tick.wait(0.001)
        self.cancelled.set()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def report(self, sender):
        sender.send(answer(self.cancelled.wait(30)), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def answer(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))])
