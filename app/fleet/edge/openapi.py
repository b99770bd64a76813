"""The OpenAPI document, from which typed clients are generated. FastAPI writes it; `declare` completes it:

- Every operation declares every error status that it can return (`statuses`, and `problem_responses` of its route). All
  of them have one schema, `Problem`; FastAPI's own schema of errors does not occur.
- The id of an operation is the name of its function in camel case: `list_runs` is `listRuns`. If two functions have the
  same name, FastAPI warns, and `flotilla openapi` refuses to write the document.
- A component has the name that a client should have for it (`NAMES`). A body that a route parses itself, and a message
  of a stream, are components too: a route puts `reference(...)` into its description.
- Paths, statuses and components are sorted, so that two documents can be compared.

Not described: `HEAD`, which works wherever `GET` does, and statuses of requests that no operation is for (405).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from app.fleet.edge.problems import BY_STATUS, KINDS, MAX_ERRORS, Problem
from app.fleet.errors import SettingsError

SCHEMA = "#/components/schemas/{model}"
RESPONSE = "#/components/responses/{name}"
# Components with another name than their class: for a client, a record is what it is a record of.
NAMES = {
    "RunRecord": "Run",
    "ActionRecord": "Action",
    "LockRecord": "Lock",
    "AnomalyView": "Anomaly",
    "ProblemDetails": "Problem",
}
# Statuses of which some kinds have the header.
RETRY_AFTER = {409, 429, 503}


def without_default(schema: dict[str, Any]) -> None:
    """Leave the default of a field out of the document: in TypeScript, a field with a default would be required."""
    schema.pop("default", None)


class FieldError(BaseModel):
    """An invalid field."""

    field: str = Field(description="The path of the field, with dots: `runs.3.payload.weight`, `query.limit`")
    message: str


class ProblemDetails(BaseModel):
    """An error in the format of RFC 9457. Some kinds have more members."""

    model_config = ConfigDict(title="Problem", extra="allow")

    type: str = Field(description="The kind of problem: a path of this service; GET it for an explanation")
    title: str
    status: int
    detail: str = Field(description="What happened, and what to do")
    instance: str = Field(description="The path of the request")
    request_id: str | None = Field(description="The id of the request; every log line of the request has it")
    errors: list[FieldError] = Field(
        [], description=f"The invalid fields; the first {MAX_ERRORS}", json_schema_extra=without_default
    )
    errors_left_out: int = Field(
        0, description="The number of further invalid fields", json_schema_extra=without_default
    )
    run: int | None = Field(
        None,
        description="The id of the run that is already active, if it is the reason for a conflict",
        json_schema_extra=without_default,
    )


def install(app: FastAPI, *, keys: bool = True) -> None:
    """Complete the document of this application. Without `keys`, callers have tokens of the service's own sign-in."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = declare(generate())
        if not keys:
            declare_tokens(document)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation does


def operation_id(route: APIRoute) -> str:
    first, *rest = route.name.strip("_").split("_")
    return first + "".join(word.capitalize() for word in rest)


# -- for routes -------------------------------------------------------------------------------------------------------


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the declaration of these statuses, for `responses=` of a route."""
    return {status: {"$ref": RESPONSE.format(name=response_name(status))} for status in statuses}


def reference(kind: Any, mode: Literal["validation", "serialization"] = "serialization") -> dict[str, Any]:
    """Return the reference to the component of this type. `declare` moves `$defs` to the components."""
    found, defined = TypeAdapter.json_schemas([(kind, mode, TypeAdapter(kind))], ref_template=SCHEMA)
    return {**found[kind, mode], "$defs": defined["$defs"]}


def described(model: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a body that its route parses itself, for `openapi_extra=` of the route."""
    return {"requestBody": {"content": {"application/json": {"schema": reference(model, "validation")}}}}


def event_stream(kind: Any) -> dict[str, Any]:
    """Return the description of a response of Server-Sent Events whose `data` is JSON of this type.

    `itemSchema` is a field of OpenAPI 3.2, which FastAPI uses for its own streams too.
    """
    text = {"type": "string"}
    data = {**text, "contentMediaType": "application/json", "contentSchema": reference(kind)}
    fields = {"event": text, "data": data, "id": text, "retry": {"type": "integer"}}
    content = {"schema": text, "itemSchema": {"type": "object", "properties": fields}}
    return {"description": "Server-Sent Events", "content": {EventSourceResponse.media_type: content}}


# -- the document -----------------------------------------------------------------------------------------------------


def declare(document: dict[str, Any]) -> dict[str, Any]:
    """Complete FastAPI's document."""
    components = document.setdefault("components", {})
    if "responses" in components:
        # FastAPI keeps its document, and it is complete.
        return document
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    used: set[int] = set()
    for operations in document["paths"].values():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", []):
                parameter["schema"] = without_null(parameter["schema"])
            used |= declare_problems(method, operation)
    components["responses"] = {response_name(status): problem_response(status) for status in sorted(used)}
    for inner in [node.pop("$defs") for node in objects(document) if "$defs" in node]:
        add(schemas, inner)
    add(schemas, reference(ProblemDetails)["$defs"])
    rename(document, schemas)
    components["schemas"] = dict(sorted(schemas.items()))
    document["paths"] = dict(sorted(document["paths"].items()))
    return document


def declare_tokens(document: dict[str, Any]) -> None:
    """Replace API keys by the tokens of a sign-in of the service."""
    schemes = document["components"].get("securitySchemes", {})
    schemes.pop("APIKeyHeader", None)
    for scheme in schemes.values():
        scheme["description"] = "A token that the sign-in of this service accepts"
    for operations in document["paths"].values():
        for operation in operations.values():
            if "security" in operation:
                operation["security"] = [each for each in operation["security"] if "APIKeyHeader" not in each]


def declare_problems(method: str, operation: dict[str, Any]) -> set[int]:
    """Declare the statuses that every route of this kind can return; return those that refer to a shared response."""
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    for status, declared in problem_responses(*statuses(method, operation)).items():
        responses.setdefault(str(status), declared)
    shared = {status: response["$ref"] for status, response in responses.items() if "$ref" in response}
    # FastAPI has added a description beside each reference.
    responses |= {status: {"$ref": target} for status, target in shared.items()}
    operation["responses"] = dict(sorted(responses.items()))
    return {int(status) for status in shared}


def statuses(method: str, operation: Mapping[str, Any]) -> Iterator[int]:
    """Return the error statuses that follow from a route's parameters, body and authentication."""
    parameters = operation.get("parameters", [])
    changes = method not in {"get", "head"}
    if any(each["in"] == "path" for each in parameters):
        yield 404
    if changes:
        yield 413
    if "requestBody" in operation:
        yield from (400, 415)
    if parameters or "requestBody" in operation:
        yield 422
    if operation.get("security"):
        # Every key has the scope `read`, so a route that only reads never returns 403.
        yield from (401, 403, 429) if changes else (401, 429)
    yield from (500, 503)


def response_name(status: int) -> str:
    return "".join(word.capitalize() for word in BY_STATUS[status].slug.split("-"))


def problem_response(status: int) -> dict[str, Any]:
    """Return the response that all operations share for this status."""
    kinds = [f"`/problems/{kind.slug}`: {kind.title}." for kind in KINDS.values() if kind.status == status]
    response: dict[str, Any] = {
        "description": " ".join(kinds),
        "content": {Problem.media_type: {"schema": {"$ref": SCHEMA.format(model=ProblemDetails.__name__)}}},
    }
    if status in RETRY_AFTER:
        text = "The number of seconds after which to send the request again, where that helps"
        response["headers"] = {"Retry-After": {"description": text, "schema": {"type": "integer"}}}
    return response


def without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter. An optional one is left out, and never null."""
    kinds = [each for each in schema.get("anyOf", []) if each != {"type": "null"}]
    if len(kinds) != 1:
        return schema
    return {**{name: value for name, value in schema.items() if name != "anyOf"}, **kinds[0]}


def objects(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a document."""
    if isinstance(node, dict):
        yield node
        node = node.values()
    elif not isinstance(node, list):
        return
    for child in list(node):
        yield from objects(child)


def add(schemas: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, schema in more.items():
        if schemas.setdefault(name, schema) != schema:
            raise name_taken(name)


def rename(document: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Give each component the name that clients should have for it."""
    renamed = {name: wanted for name in schemas if (wanted := client_name(name)) != name}
    for name, wanted in renamed.items():
        if wanted in schemas:
            raise name_taken(wanted)
        schemas[wanted] = {**schemas.pop(name), "title": wanted}
    targets = {SCHEMA.format(model=name): SCHEMA.format(model=wanted) for name, wanted in renamed.items()}
    for node in objects(document):
        if isinstance(target := node.get("$ref"), str):
            node["$ref"] = targets.get(target, target)


def client_name(name: str) -> str:
    if name.startswith("Body_"):
        # FastAPI's name for the fields of a form, or for several parameters that are one body; then the operation's id.
        operation = name.removeprefix("Body_")
        return f"{operation[:1].upper()}{operation[1:]}Body"
    return NAMES.get(name, name)


def name_taken(name: str) -> SettingsError:
    return SettingsError(
        f"the OpenAPI document would have two components with the name {name!r}, and one of them is the fleet's: "
        f"give your model another name"
    )
