"""The form of a payload: a field for each field of its JSON schema, and the payload that a sent form describes."""

import json
from dataclasses import dataclass
from typing import Any

from app.fleet.engine.actions.action import Action
from app.fleet.errors import PayloadInvalid


@dataclass(frozen=True)
class PayloadField:
    """One field of a payload, as a field of a form."""

    name: str
    label: str
    # `text`, `number`, `checkbox`, `choice`, or `json` for everything else.
    kind: str
    required: bool
    value: str
    choices: list[str]
    help: str


def payload_fields(action: Action[Any], given: dict[str, str] | None = None) -> list[PayloadField]:
    """Return the fields of the payload's JSON schema, with what was given in a form that was refused.

    A payload without fields is one field itself.
    """
    schema = action.adapter.json_schema()
    properties = schema.get("properties")
    if action.plain or not properties:
        return [
            PayloadField("payload", "Payload", "json", False, (given or {}).get("payload", "{}"), [], "A JSON object")
        ]
    return [payload_field(name, part, name in schema.get("required", ()), given) for name, part in properties.items()]


def payload_field(name: str, part: dict[str, Any], required: bool, given: dict[str, str] | None) -> PayloadField:
    kinds = {"string": "text", "integer": "number", "number": "number", "boolean": "checkbox"}
    choices = [each for each in part.get("enum", ()) if isinstance(each, str)]
    is_choice = bool(choices) and len(choices) == len(part["enum"])
    kind = "choice" if is_choice else "json" if "enum" in part else kinds.get(part.get("type", ""), "json")
    default = part.get("default")
    value = "" if default is None else default if kind in {"text", "choice"} else json.dumps(default)
    if given is not None:
        # A browser sends nothing for a box that is not checked.
        value = given.get(f"payload.{name}", "")
    note = part.get("description") or ("As JSON" if kind == "json" else "")
    return PayloadField(f"payload.{name}", part.get("title", name), kind, required, value, choices, note)


def payload_of(action: Action[Any], given: dict[str, str]) -> Any:
    """Return the payload that the fields of the form describe. The action's type checks it when it is triggered."""
    payload: dict[str, Any] = {}
    for each in payload_fields(action):
        text = given.get(each.name, "")
        if each.name == "payload":
            return parsed("payload", text or "{}")
        name = each.name.removeprefix("payload.")
        if each.kind == "checkbox":
            payload[name] = text == "true"
        elif each.kind in {"text", "choice"} and (text or each.required):
            payload[name] = text
        elif text:
            payload[name] = parsed(each.name, text)
    return payload


def parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise PayloadInvalid(f"{name} is not JSON: {error}") from None
