"""AcceptArgument: the argument `accept`, with which a client chooses the content type of the answer.

Source: deepaas 2.6.0, api/v2/predict.py. It is read like other arguments: the header Accept counts only if the field
declares that location, or if the setting allows it.
"""

from __future__ import annotations

import copy
from typing import Any

ANY = "*/*"
JSON_TYPES = ("application/json", ANY)


class AcceptArgument:
    """The argument of one model; without it, every answer is JSON.

    `arguments` are the model's, with the field adapted: */* is accepted too, and the default is the field's if it is
    one of the choices, otherwise the first choice. The model's own field and its list of choices remain unchanged.
    """

    def __init__(self, declared: dict[str, Any], *, by_header: bool) -> None:
        self.choices: list[str] = []
        self.arguments = declared
        self._by_header = by_header
        field = declared.get("accept")
        if not field:
            return
        field = copy.copy(field)
        field.validators = [self._widen(each) for each in field.validators]
        if self.choices and field.load_default not in self.choices:
            field.load_default = self.choices[0]
        self.arguments = {**declared, "accept": field}

    def _widen(self, validator: Any) -> Any:
        """Return a validator that also accepts any type; its error text still lists the original choices."""
        if not hasattr(validator, "choices"):
            return validator
        widened = copy.copy(validator)
        widened.choices = [*validator.choices, ANY]
        self.choices = self.choices or widened.choices
        return widened

    def from_header(self, headers: dict[str, list[Any]]) -> dict[str, Any] | None:
        """Return the type that the header Accept chooses, if the setting allows it and exactly one type is named."""
        if not self._by_header or not self.choices or "accept" not in headers:
            return None
        media_types = [each.split(";") for each in ",".join(headers["accept"]).split(",")]
        types = {kind.strip().lower() for kind, *more in media_types if not any(_excludes(each) for each in more)}
        found = [choice for choice in self.choices if choice != ANY and choice.lower() in types]
        return {"accept": found[0]} if len(found) == 1 else None


def _excludes(parameter: str) -> bool:
    """Return whether a parameter of a media type rejects it."""
    name, _, value = parameter.partition("=")
    return name.strip().lower() == "q" and value.strip(" 0.") == "" and "0" in value
