"""A user's own error pages, by Flask."""

import flask


class Refused(Exception):
    pass


class Wrapped(Refused):
    pass


class WithErrors:
    model_error_handler = flask.Blueprint("error_handlers", __name__)

    @model_error_handler.app_errorhandler(Refused)
    def refused(error):
        return "refused: " + str(error), 409, {"X-Reason": "mine", "Content-Type": "text/plain"}

    @model_error_handler.app_errorhandler(ZeroDivisionError)
    def divided(error):
        return {"zero": True}

    @model_error_handler.app_errorhandler(KeyError)
    def unknown(error):
        raise ValueError("the page of an error fails")

    @model_error_handler.app_errorhandler(404)
    def missing(error):
        return "nothing here", 404

    @model_error_handler.app_errorhandler(LookupError)
    def looked_up(error):
        return flask.jsonify(path=flask.request.path, method=flask.request.method, sent=flask.request.get_json()), 410

    @model_error_handler.app_errorhandler(MemoryError)
    def nothing(error):
        return None

    def predict(self, X, names, meta=None):
        raised = {
            "refused": Refused("no \xe9"),
            "wrapped": Wrapped("more"),
            "zero": ZeroDivisionError(),
            "key": KeyError("k"),
            "index": IndexError("i"),
            "value": ValueError("unheard of"),
            "memory": MemoryError(),
        }
        if meta["tags"]["give"] == "abort":
            flask.abort(404)
        if meta["tags"]["give"] == "abort-403":
            flask.abort(403, "mine alone")
        raise raised[meta["tags"]["give"]]

    def transform_input(self, X, names, meta=None):
        return self.predict(X, names, meta)

    def health_status(self):
        raise Refused("unwell")
