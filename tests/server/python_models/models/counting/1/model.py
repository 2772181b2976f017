import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Counts its requests in metrics of its own, and says so in the log."""

    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="requests_seen", description="Requests that the model has seen", kind=pb_utils.MetricFamily.COUNTER
        )
        self.requests_seen = self.family.Metric(labels={"model": args["model_name"]})
        self.sizes = pb_utils.MetricFamily(
            name="request_size", description="Elements of a request", kind=pb_utils.MetricFamily.HISTOGRAM
        )
        self.size = self.sizes.Metric(buckets=[1.0, 10.0])
        self.latest = pb_utils.MetricFamily("latest_size", "The latest", pb_utils.MetricFamily.GAUGE)
        self.last = self.latest.Metric()

    def execute(self, requests):
        logger = pb_utils.Logger
        responses = []
        for request in requests:
            size = request.inputs()[0].as_numpy().size
            self.requests_seen.increment(1)
            self.size.observe(size)
            self.last.set(size)
            self.last.increment(-1)
            logger.log_info("seen one")
            logger.log("with a warning", logger.WARNING)
            logger.log_verbose("and much more")
            logger.log_error("and an error")
            counted = np.array([self.requests_seen.value(), self.last.value()])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("COUNTED", counted)]))
        return responses
