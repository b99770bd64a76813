"""OpenAPI declares the one shape of errors as the schema `Problem`, for every status that a route can answer with."""

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from app.fleet.http.edge.problems import MAX_ERRORS, Problem


def install(app: FastAPI) -> None:
    generate = app.openapi
    app.openapi = lambda: declare(generate())  # type: ignore[method-assign]  # as the framework's documentation does


class FieldError(BaseModel):
    """What is wrong with one field."""

    field: str = Field(description="Its path, with dots: `runs.3.payload.weight`, `query.limit`")
    message: str


class ProblemDetails(BaseModel):
    """An error, as RFC 9457 has it. Some kinds have more members."""

    model_config = ConfigDict(title="Problem", extra="allow")

    type: str = Field(description="The kind, as a path of this service: GET it for an explanation")
    title: str
    status: int
    detail: str = Field(description="What happened, and what to do")
    instance: str = Field(description="The path of the request")
    request_id: str | None = Field(description="The log has it on every line of this request")
    errors: list[FieldError] | None = Field(None, description=f"The fields that do not fit, the first {MAX_ERRORS}")
    errors_left_out: int | None = Field(None, description="How many more fields do not fit")
    run: int | None = Field(None, description="The run that is active already, if that is the conflict")


REFERENCE = "#/components/schemas/{model}"


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return how OpenAPI declares these statuses: for `responses=` of a route."""
    content = {Problem.media_type: {"schema": {"$ref": REFERENCE.format(model="Problem")}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def declare(schema: dict[str, Any]) -> dict[str, Any]:
    """Declare the one shape of errors, in place of the framework's own, and the statuses that follow from a route."""
    shapes = schema.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        shapes.pop(unused, None)
    shape = ProblemDetails.model_json_schema(ref_template=REFERENCE)
    shapes |= shape.pop("$defs")
    shapes["Problem"] = shape
    for operations in schema["paths"].values():
        for method, operation in operations.items():
            responses = operation["responses"]
            if "HTTPValidationError" in str(responses.get("422")):
                del responses["422"]
            for status, declared in problem_responses(*statuses(method, operation)).items():
                responses.setdefault(str(status), declared)
    return schema


def statuses(method: str, operation: Mapping[str, Any]) -> Iterator[int]:
    """Return the statuses that follow from what a route takes and needs."""
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
        # Every key may read.
        yield from (401, 403, 429) if changes else (401, 429)
    yield from (500, 503)
