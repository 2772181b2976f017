"""What deepaas-cli and deepaas-predict are told to do, and with what deepaas-run does not start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Command:
    """One command. models: name -> module[:attribute]; files: name -> text, in {folder}, where it runs."""

    name: str
    program: str
    words: list[str]
    models: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def written(self) -> dict[str, Any]:
        """Give the command as it stands in the file, but for what came of it."""
        return {name: value for name, value in vars(self).items() if value or name == "words"}


ONE = {"m": "commanded"}
TWO = {"m": "commanded", "n": "basic"}
OLD = {"m": "first_version"}
FILES = {"f.txt": "of the file", "g.png": "of a picture"}


def cli(name: str, *words: str, models: dict[str, str] = ONE, **more: Any) -> Command:
    """Say a command of deepaas-cli."""
    return Command(name, "deepaas-cli", list(words), models, **more)


def predict(name: str, *words: str, models: dict[str, str] = OLD, **more: Any) -> Command:
    """Say a command of deepaas-predict, which has a file to predict from."""
    return Command(name, "deepaas-predict", list(words), models, files=FILES, **more)


def run(name: str, *words: str, models: dict[str, str] = ONE, **more: Any) -> Command:
    """Say a command of deepaas-run, which ends by itself (or serves)."""
    return Command(name, "deepaas-run", list(words), models, **more)


OUT = "--deepaas_method_output"
COMMANDS = [
    cli("metadata", "get_metadata"),
    cli("metadata-stored", OUT, "out/meta.json", "get_metadata"),
    cli("nothing"),
    cli("warm", "warm"),
    cli("warm-missing", "warm", models={"m": "basic"}),
    cli("predict", "predict"),
    cli("predict-given", "predict", "--text", "x y", "--int", "5", "--float", "1e3", "--bool", "no", "--list", "[1, 2]",
        "--dict", "{'b': [1]}", "--date", "2020-01-02", "--a-hyphen", "hh", "--an_underscore", "uu", "--delimited",
        "1,2"),
    cli("predict-abbreviated", "predict", "--tex", "x"),
    cli("predict-equals", "predict", "--text=x", "--int=7"),
    cli("predict-outside-enum", "predict", "--choice", "z"),
    cli("predict-odd-bool", "predict", "--bool", "perhaps"),
    cli("predict-bad-int", "predict", "--int", "x"),
    cli("predict-bad-list", "predict", "--list", "[1"),
    cli("predict-list-of-text", "predict", "--list", "['a']"),
    cli("predict-unknown", "predict", "--nonsense", "1"),
    cli("predict-file", "predict", "--file", "f.txt", files=FILES),
    cli("predict-file-missing", "predict", "--file", "none.txt"),
    cli("predict-plain-field", "predict", "--plain", "p"),
    cli("predict-stored", OUT, "out/deep/y.json", "predict"),
    cli("predict-stored-otherwise", OUT, "y.txt", "predict"),
    cli("predict-stored-without-extension", OUT, "y", "predict"),
    cli("predict-stored-file", OUT, "y.json", "predict", "--file", "g.png", files=FILES),
    cli("predict-accept-png", OUT, "y.png", "predict", "--accept", "image/png", "--give", "bytesio"),
    cli("predict-accept-png-otherwise", OUT, "y.bin", "predict", "--accept", "image/png", "--give", "bytesio"),
    cli("predict-accept-png-bytes", OUT, "y.png", "predict", "--accept", "image/png", "--give", "bytes"),
    cli("predict-accept-text", OUT, "y.txt", "predict", "--accept", "text/plain", "--give", "text"),
    cli("predict-accept-unknown", OUT, "y.json", "predict", "--accept", "application/x-nonsense"),
    cli("predict-text", "predict", "--give", "text"),
    cli("predict-bytes", "predict", "--give", "bytes"),
    cli("predict-set-stored", OUT, "y.json", "predict", "--give", "set"),
    cli("predict-error", "predict", "--give", "error"),
    cli("predict-option-after", "predict", OUT, "y.json"),
    cli("predict-without-processes", "--nodeepaas_with_multiprocessing", "predict"),
    cli("train", "train", "--epochs", "2"),
    cli("train-stored", OUT, "out/t.json", "train", "--epochs", "2", "--rate", "0.25"),
    cli("train-without-what-it-needs", "train"),
    cli("train-file", "train", "--epochs", "1", "--file", "f.txt", files=FILES),
    cli("train-error", "train", "--epochs", "1", "--give", "error"),
    cli("train-set", "train", "--epochs", "1", "--give", "set"),
    cli("optional", "predict", "--must", "1", models={"o": "optional"}),
    cli("optional-stored", OUT, "y.json", "predict", "--must", "1", models={"o": "optional"}),
    cli("optional-train", "train", "--must", "1", models={"o": "optional"}),
    cli("unknown-method", "explain"),
    cli("of-an-instance", "predict", models={"w": "forms:whole"}),
    cli("of-a-class", "get_metadata", models={"w": "forms:Whole"}),
    cli("of-statics", "predict", models={"w": "forms:Static"}),
    cli("of-nothing", "get_metadata", models={"w": "empty"}),
    cli("no-models", "get_metadata", models={}),
    cli("two-models", "get_metadata", models=TWO),
    cli("two-models-named", "--model-name", "n", "get_metadata", models=TWO),
    cli("two-models-by-the-environment", "get_metadata", models=TWO, environment={"DEEPAAS_V2_MODEL": "n"}),
    cli("unknown-model", "get_metadata", environment={"DEEPAAS_V2_MODEL": "x"}),
    cli("version", "--version"),
    predict("old-predict", "-i", "g.png", "-o", "out/"),
    predict("old-predict-in-full", "--input-file", "f.txt", "--content-type", "application/json", "--output", "a/b"),
    predict("old-predict-file-of-the-model", "-i", "g.png", "-ct", "application/zip", "-o", "out"),
    predict("old-predict-address", "-i", "http://example.com/a.b.jpg", "--url", "-o", "out"),
    predict("old-predict-no-address", "-i", "g.png", "-u", "--nourl", "-o", "out"),
    predict("old-predict-without-a-file", "-o", "out"),
    predict("old-predict-without-a-folder", "-i", "g.png"),
    predict("old-predict-of-no-file", "-i", "none.png", "-o", "out"),
    predict("old-predict-of-no-type", "-i", "g.png", "-ct", "nonsense", "-o", "out"),
    predict("old-predict-nothing", "-i", "g.png", "-ct", "text/plain", "-o", "out"),
    predict("old-predict-of-a-model-without", "-i", "g.png", "-o", "out", models=ONE),
    predict("old-predict-of-two", "-i", "g.png", "-o", "out", models={**OLD, "n": "basic"}),
    predict("old-predict-of-one-of-two", "-i", "g.png", "-o", "out", models={**OLD, "n": "basic"},
            environment={"DEEPAAS_V2_MODEL": "m"}),
    predict("old-predict-unknown-option", "-i", "g.png", "-o", "out", "--nonsense"),
    run("run-version", "--version"),
    run("run-unknown-option", "--nonsense"),
    run("run-base-path-without-a-slash", "--base-path", "base"),
    run("run-bad-port", "--listen-port", "99999"),
    run("run-bad-size", "--client-max-size", "-1"),
    run("run-bad-workers", "-p", "many"),
    run("run-no-workers", "-p", "0"),
    run("run-no-file", "--config-file", "none.ini"),
    run("run-bad-file", "--config-file", "bad.ini", files={"bad.ini": "nonsense"}),
    run("run-bad-value-in-a-file", "--config-file", "bad.ini", files={"bad.ini": "[DEFAULT]\nworkers = many\n"}),
    run("run-unknown-in-a-file", "--config-file", "odd.ini",
        files={"odd.ini": "[DEFAULT]\nnonsense = 1\n[other]\na = b\n"}),
    run("run-unknown-model", "--model-name", "x"),
    run("run-unknown-model-by-the-environment", environment={"DEEPAAS_V2_MODEL": "x"}),
    run("run-warm-fails", models={"m": "unready:Failing"}),
    run("run-warm-fails-but-is-not-wanted", "--nowarm", models={"m": "unready:Failing"}),
    run("run-warm-later", models={"m": "unready:Later"}),
    run("run-args-fail", models={"m": "unready:ArgsFail"}),
    run("run-args-are-no-dict", models={"m": "unready:ArgsOfList"}),
    run("run-args-are-no-fields", models={"m": "unready:ArgsOfTexts"}),
    run("run-import-fails", models={"m": "broken"}),
    run("run-no-such-module", models={"m": "no_such_module"}),
    run("run-no-such-attribute", models={"m": "commanded:nothing"}),
    run("run-one-of-two-fails", models={"m": "broken", "n": "basic"}),
    run("run-of-a-class", models={"m": "forms:Whole"}),
    run("run-schema-of-an-instance", models={"m": "schemas:OfInstance"}),
    run("run-schema-of-a-text", models={"m": "schemas:OfText"}),
    run("run-schema-of-nonsense", models={"m": "schemas:OfNonsense"}),
    run("run-schema-of-another-class", models={"m": "schemas:OfAnotherClass"}),
    run("run-accept-without-choices", models={"m": "accepts:Unchecked"}),
    run("run-name-with-a-blank", models={"a b": "basic"}),
    run("run-no-models", models={}),
]  # fmt: skip
