"""What a module keeps in its globals is its worker's."""

from webargs import fields

CALLS = []
WARMED = []


def warm():
    WARMED.append(1)


def get_predict_args():
    return {"give": fields.Str(missing="x")}


def predict(give):
    CALLS.append(give)
    return {"warmed": len(WARMED), "calls": CALLS}


def get_train_args():
    return {"give": fields.Str(missing="t")}


def train(give):
    return {"warmed": len(WARMED)}
