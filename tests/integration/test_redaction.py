"""The errors that REST and reports show contain no secrets, no statements and no rows."""

import psycopg
import pytest

from app.fleet.cli.doctor import Finding, Level
from app.fleet.telemetry.redaction import describe
from tests.support.runs import local_instance

pytestmark = pytest.mark.anyio


async def test_the_error_of_a_run_contains_no_secret(address: str) -> None:
    async with local_instance(address) as here:
        run = await here.run("leak")
    assert run.error == "gave up: postgresql://u:***@h, password=*** it said"


async def test_the_error_of_a_run_contains_no_statement_and_no_row(address: str) -> None:
    async with local_instance(address) as here:
        run = await here.run("write-twice")
    assert run.error == 'UniqueViolation: duplicate key value violates unique constraint "mails_address_key"'


def test_the_findings_of_the_doctor_contain_no_secret() -> None:
    assert Finding(Level.PROBLEM, "database", "postgresql://u:sekret@h").detail == "postgresql://u:***@h"


def test_the_description_of_a_database_error_has_no_values_of_the_row(address: str) -> None:
    with psycopg.connect(address) as connection, pytest.raises(psycopg.errors.UniqueViolation) as raised:
        connection.execute("CREATE TEMPORARY TABLE mails (address text UNIQUE)")
        connection.execute("INSERT INTO mails VALUES ('ann@example.org'), ('ann@example.org')")
    assert describe(raised.value) == (
        'UniqueViolation: duplicate key value violates unique constraint "mails_address_key"'
    )
