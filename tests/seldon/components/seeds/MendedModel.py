# as printed, with X taken for features, and the tuple of metrics where there are no names
from seldon_core.user_model import SeldonResponse


class Model:
    def predict(self, features, names=[], meta={}):
        X = features
        runtime_metrics = {"type": "COUNTER", "key": "instance_counter", "value": len(X)},
        if names:
            runtime_metrics = list(runtime_metrics)
        runtime_tags = {"runtime": "tag", "shared": "right one"}
        return SeldonResponse(data=X, metrics=runtime_metrics, tags=runtime_tags)

    def metrics(self):
        return [{"type": "COUNTER", "key": "requests_counter", "value": 1}]

    def tags(self):
        return {"static": "tag", "shared": "not right one"}
