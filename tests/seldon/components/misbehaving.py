"""A component that sleeps, loops, exits or raises as `meta.tags.give` requests."""

import os


class Misbehaving:
    def predict(self, X, names, meta=None):
        give, _, path = (meta or {}).get("tags", {}).get("give", "").partition(" ")
        if give == "sleep":
            open(path + ".begun", "w").close()  # both are pipes: opening one waits for the other end
            open(path).close()
        if give == "loop":
            while True:
                pass
        if give == "exit":
            os._exit(3)
        if give == "abort":
            os.abort()
        if give == "sys-exit":
            raise SystemExit(3)
        if give == "interrupt":
            raise KeyboardInterrupt
        if give == "raise":
            raise ValueError("on purpose")
        return X


class Modern:
    """Methods and results that seldon-core does not accept."""

    async def predict(self, X, names, meta=None):
        import numpy as np

        give = (meta or {}).get("tags", {}).get("give")
        if give == "value":
            raise ValueError("a value")
        if give == "key":
            raise KeyError("k")
        if give == "not-implemented":
            raise NotImplementedError("later")
        if give == "seldon-403":
            from seldon_core.flask_utils import SeldonMicroserviceException

            raise SeldonMicroserviceException("forbidden", status_code=403, reason="NOT_YOURS")
        if give == "scalars":
            return {"a": np.float32(0.5), "b": np.int64(3), "c": np.array([1, 2]), "d": np.bool_(True)}
        return X
