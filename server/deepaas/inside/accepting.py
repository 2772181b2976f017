"""AcceptArgument: the argument `accept`, by which a client says what type of answer it wants.

Source: deepaas 2.6.0, api/v2/predict.py. It is read as all arguments are: the header Accept counts only where the
field says so, or where the setting lets it.
"""

from __future__ import annotations

import copy
from typing import Any

ANY = "*/*"
JSON_TYPES = ("application/json", ANY)


class AcceptArgument:
    """The argument of one model; without it, every answer is JSON.

    `arguments` are the model's, with the field as it is to be read: any type may be asked for, and if none is, it is
    the field's default where that is one of the choices, and the first of them otherwise. The model's own field and its
    list stay as they are.
    """

    def __init__(self, declared: dict[str, Any], *, by_header: bool) -> None:
        self.choices: list[str] = []
        self.arguments = declared
        self._by_header = by_header
        field = declared.get("accept")
        if not field:
            return
        field = copy.copy(field)
        field.validators = [self._widened(each) for each in field.validators]
        if self.choices and field.load_default not in self.choices:
            field.load_default = self.choices[0]
        self.arguments = {**declared, "accept": field}

    def _widened(self, validator: Any) -> Any:
        """Give a validator that lets any type be asked for, too: its words stay those of its choices."""
        if not hasattr(validator, "choices"):
            return validator
        widened = copy.copy(validator)
        widened.choices = [*validator.choices, ANY]
        self.choices = self.choices or widened.choices
        return widened

    def chosen(self, headers: dict[str, list[Any]]) -> dict[str, Any] | None:
        """Say what the header Accept chooses, if the setting lets it, and it names exactly one of the types."""
        if not self._by_header or not self.choices or "accept" not in headers:
            return None
        named = [each.split(";") for each in ",".join(headers["accept"]).split(",")]
        types = {kind.strip().lower() for kind, *more in named if not any(_refuses(each) for each in more)}
        found = [choice for choice in self.choices if choice != ANY and choice.lower() in types]
        return {"accept": found[0]} if len(found) == 1 else None


def _refuses(parameter: str) -> bool:
    """Tell whether a parameter of a type says that it is not wanted."""
    name, _, value = parameter.partition("=")
    return name.strip().lower() == "q" and value.strip(" 0.") == "" and "0" in value
