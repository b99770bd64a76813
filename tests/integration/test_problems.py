"""Problems: an invalid request is refused with the name of the field, in a bounded response; nothing is written."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from app.fleet import Run, action
from app.fleet.edge.openapi import ProblemDetails
from app.fleet.edge.problems import MAX_ERRORS, MAX_FIELD_LENGTH
from app.fleet.errors import PayloadInvalid
from tests.integration.test_actions_http import RUN, count_runs, get, post, send
from tests.integration.test_edge import is_problem
from tests.support.runs import LocalInstance, local_instance

pytestmark = pytest.mark.anyio


@action("texts")
async def texts(_: Run[list[str]]) -> None: ...


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address) as own:
        yield own


def fields(problem: dict[str, Any]) -> list[str]:
    return [each["field"] for each in problem["errors"]]


# -- bounded ----------------------------------------------------------------------------------------------------------


async def test_a_problem_with_a_thousand_invalid_fields_has_the_first_ones_and_the_number(
    here: LocalInstance,
) -> None:
    wrong = {f"field-{number}": 1 for number in range(1000)}
    for path, body in (
        ("/actions/noop/runs", wrong),
        ("/runs:retry", {"action": "noop", **wrong}),
        ("/runs:batch", {"runs": [{"action": "noop", **wrong}]}),
        ("/runs:batch", {"runs": [{"action": "weigh", "payload": {}}] * 1000}),
        ("/trial/parcels", {}),
    ):
        answer = await post(here, path, body)
        problem: dict[str, Any] = is_problem(answer, "invalid")
        assert len(problem["errors"]) + problem.get("errors_left_out", 0) in {1, 1000}
        assert len(problem["errors"]) <= MAX_ERRORS
        assert len(answer.content) < 10_000
    assert await count_runs(here) == 0


async def test_a_problem_with_very_many_invalid_values_has_only_their_number(here: LocalInstance) -> None:
    """A list of all these values would take hundreds of megabytes."""
    many = {"runs": [{"action": "noop", **{f"field-{number}": 1 for number in range(10)}}] * 500}
    problem: dict[str, Any] = is_problem(await post(here, "/runs:batch", many), "invalid")
    assert (fields(problem), "5000 values" in str(problem["detail"])) == (["body"], True)
    with pytest.raises(PayloadInvalid) as refused:
        texts.encode([1] * 300_000)
    assert [each["field"] for each in refused.value.errors] == ["payload"]
    assert "300000 values" in str(refused.value)


async def test_the_name_of_an_unknown_field_is_truncated(here: LocalInstance) -> None:
    for path in ("/actions/noop/runs", "/runs:retry"):
        answer = await post(here, path, {"action": "noop", "a" * 900_000: 1})
        problem: dict[str, Any] = is_problem(answer, "invalid")
        assert {len(name) for name in fields(problem) if name.startswith("aaa")} == {MAX_FIELD_LENGTH}
        assert len(answer.content) < 5_000


async def test_a_problem_repeats_only_a_part_of_a_long_path(here: LocalInstance) -> None:
    answer = await here.running.client.get("/nowhere/" + "x" * 20_000)
    is_problem(answer, "not-found")
    assert len(answer.content) < 2_000


# -- names of fields --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/actions/noop/runs", {"priority": 5000}, "priority"),
        ("/actions/weigh/runs", {"payload": {"weight": "x"}}, "payload.weight"),
        ("/runs:batch", {"runs": [{"action": "noop", "key": ""}]}, "runs.0.key"),
        ("/runs:batch", {"runs": [{"action": "weigh", "payload": {"weight": "x"}}]}, "runs.0.payload.weight"),
        ("/runs:retry", {"action": "noop", "since": "soon"}, "since"),
        ("/trial/parcels", {"weight": "x"}, "weight"),
    ],
)
async def test_an_invalid_field_of_the_body_is_named_by_its_path_in_the_body(
    here: LocalInstance, path: str, body: Any, field: str
) -> None:
    assert field in fields(is_problem(await post(here, path, body), "invalid"))


async def test_an_invalid_parameter_is_named_with_query_path_or_header(here: LocalInstance) -> None:
    client = here.running.client
    assert fields(is_problem(await client.get("/runs?limit=0"), "invalid")) == ["query.limit"]
    assert fields(is_problem(await client.get("/trial/parcels/x"), "invalid")) == ["path.number"]
    assert fields(is_problem(await client.delete("/locks/a"), "invalid")) == ["query.reason"]
    sent = await post(here, "/actions/noop/runs", headers={"idempotency-key": "a\tb"})
    assert fields(is_problem(sent, "invalid")) == ["header.Idempotency-Key"]


async def test_malformed_json_is_reported_for_the_body_with_the_position_of_the_error(here: LocalInstance) -> None:
    sent = {"content-type": "application/json"}
    for path in ("/actions/noop/runs", "/runs:batch", "/runs:retry", "/trial/parcels"):
        answer = await here.running.client.post(path, content=b'{"weight": }', headers=sent)
        problem: dict[str, Any] = is_problem(answer, "invalid")
        assert fields(problem) == ["body"]
        assert "11" in problem["errors"][0]["message"] or "12" in problem["errors"][0]["message"]


# -- invalid values ---------------------------------------------------------------------------------------------------


async def test_an_instant_may_have_any_utc_offset_of_the_standard(here: LocalInstance) -> None:
    for offset, expected in (("+23:59", "2029-12-31T00:01:00Z"), ("-23:59", "2030-01-01T23:59:00Z")):
        order = {"run_at": f"2030-01-01T00:00:00{offset}"}
        run = (await post(here, "/actions/noop/runs", order, 202)).json()
        assert run["run_at"] == expected == (await get(here, f"/runs/{run['id']}"))["run_at"]
        batch = {"runs": [{"action": "noop", **order}]}
        assert (await post(here, "/runs:batch", batch, 202)).json()["runs"][0]["run_at"] == expected
        keyed = await post(here, "/actions/noop/runs", order, 202, headers={"idempotency-key": offset})
        assert keyed.json()["run_at"] == expected


DIGITS = "9" * 4000


@pytest.mark.parametrize(
    "value", [f'"{DIGITS}s"', f'"{DIGITS}"', DIGITS, f"{DIGITS}.5", "NaN", "1e400", '"1h\\u0000"', "[]"]
)
@pytest.mark.parametrize("field", ["since", "until"])
async def test_an_invalid_duration_is_refused_with_the_name_of_its_field(
    here: LocalInstance, field: str, value: str
) -> None:
    content = f'{{"action": "noop", "{field}": {value}}}'.encode()
    answer = await here.running.client.post(
        "/runs:retry", content=content, headers={"content-type": "application/json"}
    )
    problem: dict[str, Any] = is_problem(answer, "invalid")
    assert fields(problem) in ([field], ["body"])
    assert DIGITS[:50] not in answer.text


@pytest.mark.parametrize(
    ("order", "field"),
    [
        ({"key": "a\x00b"}, "key"),
        ({"ordering_key": "a\x00b"}, "ordering_key"),
        ({"key": "a\u2028b"}, "key"),
        ({"run_at": "10000-01-01T00:00:00Z"}, "run_at"),
        ({"run_at": "2030-01-01T00:00:00+24:00"}, "run_at"),
        ({"priority": 10**50}, "priority"),
    ],
)
async def test_a_value_that_postgresql_cannot_store_is_refused_with_the_name_of_its_field(
    here: LocalInstance, order: dict[str, Any], field: str
) -> None:
    assert fields(is_problem(await post(here, "/actions/noop/runs", order), "invalid")) == [field]
    batch = {"runs": [{"action": "noop", **order}]}
    assert fields(is_problem(await post(here, "/runs:batch", batch), "invalid")) == [f"runs.0.{field}"]
    assert await count_runs(here) == 0


async def test_nul_is_refused_in_the_name_of_a_lock_and_in_the_reason_of_a_release(here: LocalInstance) -> None:
    delete = here.running.client.delete
    assert fields(is_problem(await delete("/locks/a%00b?reason=why"), "invalid")) == ["path.name"]
    assert fields(is_problem(await delete("/locks/a?reason=why%00"), "invalid")) == ["query.reason"]
    assert fields(is_problem(await delete("/locks/a?reason=one%0D%0Atwo"), "invalid")) == ["query.reason"]


@pytest.mark.parametrize(
    "payload",
    ["1" * 4301, "-" + "1" * 5000, "[" * 250 + "]" * 250, '"\\ud800"', '{"\\udfff": 1}', "NaN", "1e999", "-Infinity"],
)
async def test_a_payload_that_json_or_python_could_not_write_again_is_refused(
    here: LocalInstance, payload: str
) -> None:
    problem: dict[str, Any] = is_problem(await send(here, f'{{"payload": {{"x": {payload}}}}}'.encode()), "invalid")
    assert fields(problem) in (["body"], ["payload"])
    assert await count_runs(here) == 0


@pytest.mark.parametrize("payload", ["1" * 4300, "[" * 150 + "]" * 150, '"a\\u0000b"', "1e-400", '"\\ud83d\\ude00"'])
async def test_an_unusual_but_valid_payload_is_stored_as_it_was_sent(here: LocalInstance, payload: str) -> None:
    sent = await send(here, f'{{"payload": {{"x": {payload}}}}}'.encode())
    assert sent.status_code == 202, sent.text
    ended = await here.ended(sent.json()["id"])
    assert ended.state == "succeeded", ended.error
    shown = await get(here, f"/runs/{ended.id}")
    assert shown["payload"] == shown["result"] == {"x": json.loads(payload)}
    assert set((await get(here, "/runs"))["items"][0]) >= RUN
    repeated = f'{{"payload": {{"x": {payload}}}}}'.encode()
    headers = {"content-type": "application/json", "idempotency-key": "k"}
    keyed = await here.running.client.post("/actions/echo/runs", content=repeated, headers=headers)
    assert keyed.status_code == 202, keyed.text


# -- OpenAPI ----------------------------------------------------------------------------------------------------------


# The beginnings of the template's own paths.
OURS = ("/actions", "/events", "/health", "/locks", "/metrics", "/problems", "/runs")


def operations(schema: dict[str, Any], *, ours: bool = True) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in schema["paths"].items():
        if not ours or path.startswith(OURS):
            yield from ((method, path, operation) for method, operation in methods.items())


async def test_every_error_status_is_declared_with_the_schema_of_problems(here: LocalInstance) -> None:
    schema = await get(here, "/openapi.json")
    assert "ValidationError" not in json.dumps(schema)
    for method, path, operation in operations(schema, ours=False):
        for status, response in operation["responses"].items():
            if int(status) < 400 or (path, status) == ("/health/ready", "503"):
                continue
            kind, name = response["$ref"].split("/")[-2:]
            reference = {"$ref": "#/components/schemas/Problem"}
            content = schema["components"][kind][name]["content"]
            assert content == {"application/problem+json": {"schema": reference}}, (method, path, status)


async def test_every_route_declares_all_error_statuses_that_it_can_return(
    here: LocalInstance,
) -> None:
    schema = await get(here, "/openapi.json")
    open_to_all = {"/health/live", "/health/ready", "/problems", "/problems/{slug}"}
    for method, path, operation in operations(schema):
        declared = {int(status) for status in operation["responses"]}
        expected = {500}
        if path not in open_to_all:
            expected |= {401, 429, 503} | ({403} if method != "get" else set())
        if "{" in path:
            expected |= {404}
        if operation.get("parameters") or "requestBody" in operation:
            expected |= {422}
        if "requestBody" in operation:
            expected |= {413, 415}
        assert expected <= declared, (method, path, expected - declared)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/runs?cursor=x", None, 400),
        ("GET", "/runs?action=none-such", None, 404),
        ("GET", "/runs?limit=0", None, 422),
        ("GET", "/runs/x", None, 400),
        ("GET", "/runs/4711", None, 404),
        ("POST", "/runs/x/cancel", None, 400),
        ("POST", "/runs/{ended}/cancel", None, 409),
        ("POST", "/runs/{ended}/retry", None, 409),
        ("POST", "/runs:batch", {"runs": []}, 422),
        ("POST", "/runs:batch", {"runs": [{"action": "none-such"}]}, 404),
        ("POST", "/runs:retry", {"action": "none-such"}, 404),
        ("POST", "/actions/none-such/runs", {}, 404),
        ("POST", "/actions/none-such/pause", None, 404),
        ("GET", "/runs/x/events", None, 400),
        ("GET", "/events?after=x", None, 400),
        ("GET", "/events?action=none-such", None, 404),
        ("GET", "/events?state=none", None, 422),
        ("DELETE", "/locks/none?reason=why", None, 404),
    ],
)
async def test_every_error_response_is_declared_and_has_the_schema_of_problems(
    here: LocalInstance, method: str, path: str, body: Any, status: int
) -> None:
    if "{ended}" in path:
        path = path.replace("{ended}", str((await here.run("noop")).id))
    answer = await here.running.client.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    problem = ProblemDetails.model_validate(answer.json())
    assert problem.status == status
    schema = await get(here, "/openapi.json")
    template = template_of(schema, path.partition("?")[0])
    assert str(status) in schema["paths"][template][method.lower()]["responses"]


def template_of(schema: dict[str, Any], path: str) -> str:
    def matches(template: str) -> bool:
        pairs = zip(template.split("/"), path.split("/"), strict=False)
        same_length = template.count("/") == path.count("/")
        return same_length and all(part == given or part.startswith("{") for part, given in pairs)

    return next(str(template) for template in schema["paths"] if matches(template))
