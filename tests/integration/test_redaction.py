"""What people read of an error, over REST or in a report, has no secret, no statement and no row in it."""

import psycopg
import pytest

from app.fleet.cli.doctor import Finding, Level
from app.fleet.telemetry.redaction import describe
from tests.support.runs import local_instance

pytestmark = pytest.mark.anyio


async def test_the_error_of_a_run_has_no_secret_in_it(address: str) -> None:
    async with local_instance(address) as here:
        run = await here.run("leak")
    assert run.error == "gave up: postgresql://u:***@h, password=*** it said"


async def test_the_error_of_a_run_has_no_statement_and_no_row_in_it(address: str) -> None:
    async with local_instance(address) as here:
        run = await here.run("write-twice")
    assert run.error == 'UniqueViolation: duplicate key value violates unique constraint "mails_address_key"'


def test_what_doctor_finds_has_no_secret_in_it() -> None:
    assert Finding(Level.PROBLEM, "database", "postgresql://u:sekret@h").detail == "postgresql://u:***@h"


def test_a_database_error_is_described_without_the_rows_values(address: str) -> None:
    with psycopg.connect(address) as connection, pytest.raises(psycopg.errors.UniqueViolation) as raised:
        connection.execute("CREATE TEMPORARY TABLE mails (address text UNIQUE)")
        connection.execute("INSERT INTO mails VALUES ('ann@example.org'), ('ann@example.org')")
    assert describe(raised.value) == (
        'UniqueViolation: duplicate key value violates unique constraint "mails_address_key"'
    )
