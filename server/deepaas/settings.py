"""DeepaasSettings: the part of Settings for DEEPaaS models."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.options.setting import setting

GROUP = "DEEPaaS"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DeepaasSettings:
    """How models are served."""

    deepaas_model: str = setting(
        "",
        GROUP,
        "Of the models that there are, the one to serve; empty: as DEEPAAS_V2_MODEL says, or all.",
        unit="NAME",
    )
    deepaas_base_path: str = setting("", GROUP, "What stands before all paths of the models' API.", unit="PATH")
    deepaas_predict_endpoint: bool = setting(True, GROUP, "Answer predict/; off: with 402.")
    deepaas_train_endpoint: bool = setting(True, GROUP, "Answer train/; off: with 402.")
    deepaas_doc_endpoint: bool = setting(True, GROUP, "Have the page /api and its documents.")
    deepaas_debug_endpoint: bool = setting(False, GROUP, "Show the server's log at /v2/debug/: to anybody who asks.")
    deepaas_warm: bool = setting(True, GROUP, "Call `warm` in each process before the model is served.")
    deepaas_workers: int = setting(
        1, GROUP, "How many processes run a model's predict, each one call at a time, and how many of its trainings "
        "run at a time.", unit="processes", bounds=(1, 256),
    )  # fmt: skip
    deepaas_jobs: str = setting(
        "", GROUP, "File that keeps what there is to know of trainings; empty: one of this address and port, in the "
        "user's state folder. `none`: they are forgotten when the server ends.", unit="path",
    )  # fmt: skip
    deepaas_accept_header: bool = setting(
        False, GROUP, "Let the Accept header choose, where a model has the argument `accept` and it is not given."
    )
    deepaas_show_errors: bool = setting(False, GROUP, "Tell clients the message of what a model has raised.")
    deepaas_requirements: str = setting(
        "", GROUP, "What the models' Python holds: a requirements.txt, a Pipfile or a packed environment; empty: what "
        "the server's does.", unit="path",
    )  # fmt: skip
    deepaas_interpreter: str = setting("", GROUP, "The Python that runs the models; empty: the server's.", unit="path")
    deepaas_timeout_secs: float = setting(
        0.0, GROUP, "How long a prediction may take before its process is ended; 0: any time.",
        unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
