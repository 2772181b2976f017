"""ModelConfig, which `auto_complete_config` fills in, and functions that read a model's configuration.

Source: python_backend, src/resources/triton_python_backend_utils.py.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

_INPUT = ("name", "data_type", "dims", "optional")
_OUTPUT = ("name", "data_type", "dims")


class ModelConfig:
    """A model's configuration as far as it is known. Setters may add to it, but not contradict it.

    Raises: ValueError.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)
        self._model_config.setdefault("name", "")
        self._model_config.setdefault("max_batch_size", 0)
        self._model_config.setdefault("input", [])
        self._model_config.setdefault("output", [])

    def as_dict(self) -> dict[str, Any]:
        return self._model_config

    @property
    def _location(self) -> str:
        return f"in auto-complete-config function for model '{self._model_config['name']}'"

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the maximum rows of a batch, which may not be below the configured value."""
        configured = self._model_config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but {self._location} specified max_batch_size "
                f"{max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching, unless another scheduler is configured."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for "
                    f"model '{self._model_config['name']}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:  # noqa: A002 - Triton's name
        """Add an input, or properties of it that the configuration lacks."""
        self._add("input", input, _INPUT, "'name', 'data_type', 'dims' and 'optional'")

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output, or properties of it that the configuration lacks."""
        self._add("output", output, _OUTPUT, "'name', 'data_type' and 'dims'")

    def _add(self, kind: str, tensor: dict[str, Any], allowed: tuple[str, ...], allowed_text: str) -> None:
        if "name" not in tensor:
            raise ValueError(f"{kind} {self._location} is missing 'name' property.")
        name = tensor["name"]
        if not set(tensor) <= set(allowed):
            raise ValueError(f"{kind} '{name}' {self._location} contains property other than {allowed_text}.")
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{kind} '{name}' {self._location} is missing '{key}' property.")
        for existing in self._model_config[kind]:
            if existing["name"] == name:
                self._check_consistent(kind, existing, tensor)
                existing.update(tensor)
                return
        self._model_config[kind].append(tensor)

    def _check_consistent(self, kind: str, existing: dict[str, Any], tensor: dict[str, Any]) -> None:
        name, model = tensor["name"], self._model_config["name"]
        if existing.get("data_type", "TYPE_INVALID") not in {"TYPE_INVALID", tensor["data_type"]}:
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {existing['data_type']} for {kind} "
                f"'{name}', model provides {tensor['data_type']}"
            )
        for key in ("dims", "optional"):
            provided, configured = tensor.get(key), existing.get(key)
            is_set = configured if key == "dims" else None not in (provided, configured)
            if is_set and provided != configured:
                self._raise_mismatch(name, key, provided, configured)

    def _raise_mismatch(self, name: str, key: str, provided: Any, configured: Any) -> NoReturn:
        raise ValueError(
            f"model '{self._model_config['name']}', tensor '{name}': the model expects {key} {provided} but the model "
            f"configuration specifies {key} {configured}"
        )

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Set whether the model is decoupled; it may not contradict the configuration."""
        if not set(transaction_policy_dict) <= {"decoupled"}:
            raise ValueError(f"model transaction property {self._location} contains property other than 'decoupled'.")
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", decoupled) != decoupled:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model "
                f"'{self._model_config['name']}', which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = decoupled


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return an input's configuration, None if there is no such input."""
    return _find_tensor(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return an output's configuration, None if there is no such output."""
    return _find_tensor(model_config.get("output", ()), name)


def _find_tensor(tensors: Any, name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Return whether a configuration makes the model decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
