"""DeepaasSettings: the settings of DEEPaaS models. Settings inherits them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.options.setting import setting

GROUP = "DEEPaaS"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DeepaasSettings:
    """How DEEPaaS models are served."""

    deepaas_model: str = setting(
        "", GROUP, "Serve only this one of the available models. Default: DEEPAAS_V2_MODEL if set, otherwise all.",
        unit="NAME",
    )  # fmt: skip
    deepaas_base_path: str = setting("", GROUP, "Prefix of all paths of the models' API.", unit="PATH")
    deepaas_predict_endpoint: bool = setting(True, GROUP, "Serve predict/. Off: it returns 402.")
    deepaas_train_endpoint: bool = setting(True, GROUP, "Serve train/. Off: it returns 402.")
    deepaas_doc_endpoint: bool = setting(True, GROUP, "Serve the documentation page /api and its documents.")
    deepaas_debug_endpoint: bool = setting(
        False, GROUP, "Show the server's log at /v2/debug/, to anyone who can reach the server."
    )
    deepaas_warm: bool = setting(True, GROUP, "Call `warm` in each worker process before the model is served.")
    deepaas_workers: int = setting(
        1, GROUP, "Number of processes that run a model's predict, one call at a time each; also the maximum number of "
        "concurrent trainings.", unit="processes", bounds=(1, 256),
    )  # fmt: skip
    deepaas_jobs: str = setting(
        "", GROUP, "File that stores the state of trainings. Default: one per address and port in the user's state "
        "directory. `none`: trainings are forgotten when the server exits.", unit="path",
    )  # fmt: skip
    deepaas_accept_header: bool = setting(
        False, GROUP, "If a model has an `accept` argument and a request omits it, use the Accept header."
    )
    deepaas_show_errors: bool = setting(False, GROUP, "Return the messages of exceptions raised by a model to clients.")
    deepaas_requirements: str = setting(
        "", GROUP, "Packages for the models: a requirements.txt, a Pipfile or a packed environment. Default: the "
        "server's own packages.", unit="path",
    )  # fmt: skip
    deepaas_interpreter: str = setting(
        "", GROUP, "Python interpreter that runs the models. Default: the server's.", unit="path"
    )
    deepaas_timeout_secs: float = setting(
        0.0, GROUP, "Maximum duration of a prediction; its process is ended after that. 0: unlimited.",
        unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
