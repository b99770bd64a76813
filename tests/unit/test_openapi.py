"""The OpenAPI document is a contract: names stay, every error is a `Problem`, and every reference leads to a component.

How requests are answered is compared with the document in `tests/integration/test_problems.py`; generated clients
use it in `tests/instances/test_clients.py`.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from fastapi import Body, FastAPI
from pydantic import BaseModel

from app import main, routes
from app.fleet.cli.clients import document_of
from app.fleet.edge import openapi
from app.fleet.errors import SettingsError

# A client is generated with these names: changing one breaks its callers.
OPERATIONS = {
    "cancelRun": "post /runs/{id}/cancel",
    "checkAlive": "get /health/live",
    "checkReady": "get /health/ready",
    "followFeed": "get /events",
    "followRun": "get /runs/{id}/events",
    "getAction": "get /actions/{name}",
    "getMetrics": "get /metrics",
    "getProblem": "get /problems/{slug}",
    "getRun": "get /runs/{id}",
    "listActions": "get /actions",
    "listInstances": "get /health/instances",
    "listLocks": "get /locks",
    "listProblems": "get /problems",
    "listRuns": "get /runs",
    "pauseAction": "post /actions/{name}/pause",
    "releaseLock": "delete /locks/{name}",
    "resumeAction": "post /actions/{name}/resume",
    "retryRun": "post /runs/{id}/retry",
    "retryRuns": "post /runs:retry",
    "triggerRun": "post /actions/{name}/runs",
    "triggerRuns": "post /runs:batch",
}
COMPONENTS = {
    *("Action", "ActionList", "Alive", "Anomaly", "BatchedRun", "ChangeData", "EmittedEvent", "FeedEvent"),
    *("FeedMissed", "FieldError", "Instance", "Instances", "ListedRun", "Lock", "LockList", "LogData", "LogEvent"),
    *("NewRun", "NewRuns", "Phase", "Problem", "ProgressData", "ProgressEvent", "Ready", "Retried", "RetryFilter"),
    *("Role", "Run", "RunDone", "RunEvent", "RunList", "RunPage", "RunState", "StateData", "StateEvent"),
}


class Parcel(BaseModel):
    weight: int = 1


def new_service() -> FastAPI:
    """Return an empty service with such a document."""
    service = FastAPI(generate_unique_id_function=openapi.operation_id, separate_input_output_schemas=False)
    openapi.install(service)
    return service


def own_document() -> Any:
    service = new_service()
    service.include_router(routes.router)
    return service.openapi()


def operations(document: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        yield from ((f"{method} {path}", operation) for method, operation in methods.items())


def test_the_ids_of_operations_and_the_names_of_components_stay() -> None:
    document, own = main.app.openapi(), own_document()
    ids = {
        operation["operationId"]: path for path, operation in operations(document) if path not in dict(operations(own))
    }
    assert ids == OPERATIONS
    assert set(document["components"]["schemas"]) - (set(own["components"]["schemas"]) - COMPONENTS) == COMPONENTS


def test_no_two_operations_have_the_same_id_and_each_has_a_summary_and_a_description() -> None:
    found = [operation for _, operation in operations(main.app.openapi())]
    assert len({each["operationId"] for each in found}) == len(found)
    assert [each["operationId"] for each in found if not each.get("summary")] == []
    described = [each for each in found if each["operationId"] in OPERATIONS]
    assert [each["operationId"] for each in described if not each.get("description")] == []


def test_every_operation_declares_its_errors_with_the_one_schema_of_problems() -> None:
    document = main.app.openapi()
    shared = document["components"]["responses"]
    assert "HTTPValidationError" not in json.dumps(document)
    for response in shared.values():
        assert response["content"] == {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for path, operation in operations(document):
        if operation["operationId"] not in OPERATIONS:
            continue
        errors = {status: each for status, each in operation["responses"].items() if int(status) >= 400}
        assert {"500", "503"} <= errors.keys(), path
        for status, response in errors.items():
            if (path, status) != ("get /health/ready", "503"):
                assert response["$ref"].removeprefix("#/components/responses/") in shared, (path, status)


def test_every_reference_leads_to_a_component_and_every_component_is_used() -> None:
    document = main.app.openapi()
    used = {node["$ref"] for node in openapi.objects(document) if "$ref" in node}
    declared = {
        f"#/components/{kind}/{name}" for kind in ("schemas", "responses") for name in document["components"][kind]
    }
    assert used == declared


def test_the_messages_of_streams_have_types() -> None:
    document = main.app.openapi()
    kinds = {}
    for path in ("/runs/{id}/events", "/events"):
        content = document["paths"][path]["get"]["responses"]["200"]["content"]["text/event-stream"]
        data = content["itemSchema"]["properties"]["data"]["contentSchema"]
        kinds[path] = [each["$ref"].rpartition("/")[2] for each in data["anyOf"]]
    assert kinds == {
        "/runs/{id}/events": ["RunEvent", "EmittedEvent", "RunDone"],
        "/events": ["FeedEvent", "FeedMissed"],
    }


def test_a_second_function_of_the_same_name_is_refused() -> None:
    service = new_service()
    for path in ("/parcels", "/letters"):

        @service.get(path)
        async def list_all() -> None: ...

    with pytest.raises(SettingsError, match=r"Duplicate Operation ID listAll .*rename one of the functions"):
        document_of(service)


def test_a_model_with_the_name_of_a_component_of_the_fleet_is_refused() -> None:
    class Problem(BaseModel):
        proof: str

    service = new_service()

    @service.get("/problem")
    async def pose() -> Problem:
        return Problem(proof="")

    with pytest.raises(SettingsError, match="two components with the name 'Problem'"):
        document_of(service)


def test_a_model_of_a_body_and_of_a_response_is_one_component_and_other_bodies_have_names() -> None:
    service = new_service()

    @service.post("/parcels")
    async def send_parcel(parcel: Parcel) -> Parcel:
        return parcel

    @service.post("/labels")
    async def print_label(text: Annotated[str, Body()], copies: Annotated[int, Body()]) -> None: ...

    found = set(document_of(service)["components"]["schemas"])
    assert found == {"FieldError", "Parcel", "PrintLabelBody", "Problem"}


def test_a_document_that_is_read_twice_is_the_same() -> None:
    first = json.dumps(main.app.openapi())
    assert json.dumps(main.app.openapi()) == first
