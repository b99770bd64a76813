"""The OpenAPI schema declares the format of problems, once as `Problem`, for every status that a route can return."""

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from app.fleet.edge.problems import MAX_ERRORS, Problem


def install(app: FastAPI) -> None:
    generate = app.openapi
    app.openapi = lambda: declare(generate())  # type: ignore[method-assign]  # as FastAPI's documentation does


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
    errors: list[FieldError] | None = Field(None, description=f"The invalid fields; the first {MAX_ERRORS}")
    errors_left_out: int | None = Field(None, description="The number of further invalid fields")
    run: int | None = Field(
        None, description="The id of the run that is already active, if it is the reason for a conflict"
    )


REFERENCE = "#/components/schemas/{model}"


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the declaration of these statuses, for `responses=` of a route."""
    content = {Problem.media_type: {"schema": {"$ref": REFERENCE.format(model="Problem")}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def declare(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace FastAPI's error schema by `Problem`, and declare the statuses that every route of its kind can return."""
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    problem_schema = ProblemDetails.model_json_schema(ref_template=REFERENCE)
    schemas |= problem_schema.pop("$defs")
    schemas["Problem"] = problem_schema
    for operations in schema["paths"].values():
        for method, operation in operations.items():
            responses = operation["responses"]
            if "HTTPValidationError" in str(responses.get("422")):
                del responses["422"]
            for status, declared in problem_responses(*statuses(method, operation)).items():
                responses.setdefault(str(status), declared)
    return schema


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
