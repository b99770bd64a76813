"""Secrets are removed from all texts that people read."""

import pytest
import sqlalchemy.exc

from app.fleet.settings import FleetSettings
from app.fleet.telemetry import redaction
from app.fleet.telemetry.redaction import describe, redact


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("postgresql://app:hunter2@db/app", "postgresql://app:***@db/app"),
        ("postgresql://app:hun@ter2@db/app", "postgresql://app:***@db/app"),
        ("redis://:hunter2@db", "redis://:***@db"),
        ("host=db password=hunter2 user=app", "host=db password=*** user=app"),
        ("host=db password='hunter 2' user=app", "host=db password=*** user=app"),
        ("PGPASSWORD=hunter2 psql", "PGPASSWORD=*** psql"),
        ('{"password": "hunter 2", "user": "app"}', '{"password": ***, "user": "app"}'),
        (r'"{\"password\": \"hunter2\"}"', r'"{\"password\": ***}"'),
        ("{'client_secret': 'a b'}", "{'client_secret': ***}"),
        ("Authorization: Bearer abc.def.ghi", "Authorization: ***"),
        ("header was b'Bearer abcdefghij'", "header was b'Bearer ***'"),
        ("X-API-Key: abcdef", "X-API-Key: ***"),
        ("access_token=abc", "access_token=***"),
        ("[SQL: SELECT 1]\n[parameters: ('a', 'hunter2')]", "[SQL: SELECT 1]\n[parameters: ***]"),
        ("postgresql://app@db/app", "postgresql://app@db/app"),
        ("http://127.0.0.1:8000/runs?to=a@b", "http://127.0.0.1:8000/runs?to=a@b"),
        ("run.fenced run=17 token=41", "run.fenced run=17 token=41"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_a_secret_is_found_by_its_form(text: str, safe: str) -> None:
    assert redact(text) == safe


@pytest.fixture
def no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_secrets", set())
    monkeypatch.setattr(redaction, "_by_value", [])


@pytest.mark.usefixtures("no_secrets")
def test_the_password_of_the_database_is_hidden_wherever_it_appears() -> None:
    FleetSettings.load(database_url="postgresql://app:w%40lrus%2Ftusk@db/app")
    assert redact("it said w@lrus/tusk, then w%40lrus%2Ftusk") == "it said ***, then ***"


@pytest.mark.usefixtures("no_secrets")
def test_a_password_in_key_value_form_is_hidden_wherever_it_appears() -> None:
    FleetSettings.load(database_url="host=db user=app password=walrus-tusk")
    assert redact("it said walrus-tusk") == "it said ***"


@pytest.mark.usefixtures("no_secrets")
def test_a_secret_within_a_longer_word_is_not_hidden() -> None:
    FleetSettings.load(database_url="postgresql://app:postgres@db/app")
    assert redact("postgresql 18 as postgres") == "postgresql 18 as ***"


@pytest.mark.usefixtures("no_secrets")
def test_a_very_short_secret_is_not_hidden() -> None:
    FleetSettings.load(database_url="postgresql://app:db@db/app")
    assert redact("the db is away") == "the db is away"


def test_an_error_is_described_in_one_line() -> None:
    assert describe(ValueError("first\nsecond")) == "ValueError: first second"
    assert describe(KeyError()) == "KeyError"


def test_a_database_error_is_described_without_statement_and_parameters() -> None:
    inner = ValueError("duplicate")
    error = sqlalchemy.exc.IntegrityError("INSERT INTO t VALUES (%s)", ("hunter2",), inner)
    assert describe(error) == "ValueError: duplicate"
    assert describe(RuntimeError(f"could not: {error}")) == "RuntimeError: could not: (builtins.ValueError) duplicate"


class Unspeakable(BaseException):
    def __str__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Unspeakable(), "Unspeakable: (its text cannot be read)"),
        (ValueError("a\x00b\ud800"), "ValueError: a\\x00b\\ud800"),
        (ValueError("x" * 20_000), "ValueError: " + "x" * 10_000 + "… (10000 more characters)"),
    ],
    ids=["no text", "not for PostgreSQL", "long"],
)
def test_every_exception_can_be_described(error: BaseException, text: str) -> None:
    assert describe(error) == text


def test_the_middle_of_a_very_long_text_is_removed_before_the_search() -> None:
    described = describe(ValueError("a" * 50_000_000))
    assert described == f"ValueError: {'a' * 10_000}… (49990000 more characters)"
    text = redact(f"password=hunter2 {'a' * 1_000_000} password=hunter2")
    assert text.startswith("password=*** aaa")
    assert text.endswith("aaa password=***")
    assert len(text) < 40_000


def test_parameters_without_an_end_are_hidden_to_the_end_of_the_text() -> None:
    """The search does not start again at each of the many beginnings, which would take very long."""
    assert redact("[parameters: " * 2_000 + "hunter2") == "[parameters: ***]"
