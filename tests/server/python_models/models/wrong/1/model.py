import json
import sys

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Does what the parameter `do` of its first request says, which is wrong."""

    def initialize(self, args):
        if "initialize" in args["model_name"]:
            raise pb_utils.TritonModelException("no such weights")

    def execute(self, requests):
        do = [json.loads(request.parameters()).get("do") for request in requests]
        good = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))])
        if do[0] == "raise":
            raise ValueError("a wrong value")
        if do[0] == "raise ours":
            raise pb_utils.TritonModelException("told so")
        if do[0] == "exit":
            sys.exit(3)
        if do[0] == "name":
            pb_utils.Tensor("", np.zeros(1, np.float32))
        if do[0] == "dtype":
            pb_utils.Tensor("OUT", np.zeros(1, np.complex64))
        if do[0] == "text":
            pb_utils.Tensor("OUT", np.array(["text"]))
        if do[0] == "count":
            return [good] * (len(requests) + 1)
        if do[0] == "tuple":
            return tuple([good] * len(requests))
        if do[0] == "strings":
            return ["good"] * len(requests)
        if do[0] == "surrogate":
            raise ValueError("lone \udc80 one")
        return [
            pb_utils.InferenceResponse(error=pb_utils.TritonError(f"no {what}", getattr(pb_utils.TritonError, what)))
            if what
            else good
            for what in do
        ]

    def finalize(self):
        raise ValueError("cannot end")
