"""Invalid settings are refused at the start, with a message for the operator."""

from pathlib import Path
from typing import Any

import pytest

from app.fleet.api_keys import make_key
from app.fleet.errors import SettingsError
from app.fleet.settings import FleetSettings
from app.settings import Settings

ADDRESS = "postgresql://user:hunter2@db.internal/app"


def refused(**values: Any) -> str:
    with pytest.raises(SettingsError) as error:
        Settings.load(**values)
    return str(error.value)


def test_without_any_setting_the_service_is_in_development_on_the_embedded_database() -> None:
    settings = Settings.load()
    assert settings.embedded
    assert not settings.production
    assert settings.migrates_on_start
    assert settings.drain_delay_seconds == 1.0


def test_in_production_the_service_waits_for_load_balancers_and_does_not_migrate() -> None:
    _, line = make_key("ops", "admin")
    settings = Settings.load(environment="production", database_url=ADDRESS, api_keys=line)
    assert settings.drain_delay_seconds == 5.0
    assert not settings.migrates_on_start
    assert settings.logs_as_json


@pytest.mark.parametrize("name", ["DATABASE_URL", "FLOTILLA_DATABASE_URL"])
def test_the_variable_of_the_database_may_have_the_prefix_or_not(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, ADDRESS)
    settings = Settings.load()
    assert settings.database_url is not None
    assert settings.database_url.get_secret_value() == ADDRESS


@pytest.mark.parametrize(
    ("given", "meant"),
    [("FLOTILLA_DRAIN_DELAI", "FLOTILLA_DRAIN_DELAY"), ("FLOTILLA_ENV", "FLOTILLA_ENVIRONMENT")],
)
def test_a_typing_error_is_refused_and_the_right_name_suggested(
    monkeypatch: pytest.MonkeyPatch, given: str, meant: str
) -> None:
    monkeypatch.setenv(given, "5")
    assert refused() == f"{given} is not a setting; did you mean {meant}?"


def test_a_typing_error_in_the_env_file_is_refused_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("FLOTILLA_NAMESPCE=x\nOTHER=y\n")
    monkeypatch.setitem(Settings.model_config, "env_file", str(tmp_path / ".env"))
    assert "did you mean FLOTILLA_NAMESPACE?" in refused()


def test_a_service_variable_of_kubernetes_is_refused_with_an_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOTILLA_SERVICE_HOST", "10.0.0.1")
    assert "enableServiceLinks: false" in refused()


def test_a_service_can_add_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(FleetSettings):
        feed_token: str = ""

    monkeypatch.setenv("FLOTILLA_FEED_TOKEN", "x")
    assert Own.load().feed_token == "x"
    assert "FLOTILLA_FEED_TOKEN is not a setting" in refused()


def test_files_of_a_directory_are_settings_and_the_environment_takes_precedence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("DATABASE_URL", ADDRESS), ("FLOTILLA_NAMESPACE", "from-file"), ("FLOTILLA_PORT", "9000")):
        (tmp_path / name).write_text(f"{value}\n")
    monkeypatch.setenv("FLOTILLA_SECRETS_DIR", str(tmp_path))
    monkeypatch.setenv("FLOTILLA_PORT", "9001")
    settings = Settings.load()
    assert settings.database_url is not None
    assert settings.database_url.get_secret_value() == ADDRESS
    assert (settings.namespace, settings.port) == ("from-file", 9001)

    (tmp_path / "FLOTILLA_NAMESPCE").write_text("typing error")
    assert "FLOTILLA_NAMESPCE is not a setting" in refused()
    monkeypatch.setenv("FLOTILLA_SECRETS_DIR", str(tmp_path / "none"))
    assert "FLOTILLA_SECRETS_DIR: there is no directory" in refused()


@pytest.mark.parametrize("version", ["", "1.0 beta", "1.0\n", "ü", "x" * 101])
def test_a_version_that_lists_and_metrics_could_not_show_is_refused(version: str) -> None:
    with pytest.raises(SettingsError, match=r"FLOTILLA_VERSION.*printable"):
        Settings.load(version=version)
    assert Settings.load(version="c0ffee1").version == "c0ffee1"


@pytest.mark.parametrize(
    "address",
    [
        "https://traces.example/", "javascript:alert('{trace_id}')", "//traces.example/{trace_id}",
        "https://traces.example/ {trace_id}", "https://", "{trace_id}",
    ],
)  # fmt: skip
def test_an_address_of_traces_that_leads_nowhere_is_refused(address: str) -> None:
    assert "FLOTILLA_TRACE_URL: use an address of http or https that contains {trace_id}" in refused(trace_url=address)


def test_the_address_of_a_trace_has_its_id() -> None:
    settings = Settings.load(trace_url="https://traces.example/{trace_id}/view")
    assert settings.address_of_trace("0af7") == "https://traces.example/0af7/view"
    assert (settings.address_of_trace(None), Settings.load().address_of_trace("0af7")) == (None, None)


@pytest.mark.parametrize("name", ["Api", "1st", "a_b", "a" * 64, "-a", "a.b", "ä", "a b", ""])
@pytest.mark.parametrize("field", ["namespace", "instance_name", "workspace"])
def test_an_invalid_name_is_refused_with_an_example(field: str, name: str) -> None:
    assert "such as 'api-2'" in refused(**{field: name})


@pytest.mark.parametrize("name", ["a", "api-2", "a" * 63, "x--y", "z9"])
def test_a_valid_name_is_accepted(name: str) -> None:
    assert Settings.load(namespace=name, instance_name=name).namespace == name


@pytest.mark.parametrize("name", ["pg-mine", "pg", "information-schema"])
def test_a_namespace_that_postgresql_reserves_is_refused(name: str) -> None:
    assert "PostgreSQL reserves" in refused(namespace=name)


def test_production_is_refused_on_the_embedded_database() -> None:
    assert "set DATABASE_URL" in refused(environment="production")


@pytest.mark.parametrize(
    "origin",
    [
        "https://app.example/",
        "app.example",
        "https://App.example",
        "https://*.example",
        "https://a.example:443",
        "null",
    ],
)
def test_what_is_no_origin_as_browsers_send_it_is_refused(origin: str) -> None:
    assert f"{origin!r} is not the origin of a page" in refused(cors_origins=origin)


def test_every_origin_is_allowed_alone_and_not_beside_others() -> None:
    assert Settings.load(cors_origins="*").cors_origins == ("*",)
    assert "'*' means every origin" in refused(cors_origins="https://app.example,*")
    given = "https://app.example, http://localhost:5173,http://[::1]:5173"
    assert Settings.load(cors_origins=given).cors_origins == tuple(each.strip() for each in given.split(","))


@pytest.mark.parametrize(("proxy", "why"), [
    ("proxy.example", "does not appear to be"), ("*", "does not appear to be"), ("10.1.2.3/8", "has host bits set"),
    ("0.0.0.0/0", "is every address"), ("::/0", "is every address"),
])  # fmt: skip
def test_a_proxy_is_an_address_or_a_network_and_not_every_address(proxy: str, why: str) -> None:
    assert why in refused(trusted_proxies=f"10.1.2.3,{proxy}")
    given = Settings.load(trusted_proxies="10.1.2.3, 10.2.0.0/16,fd00::/8")
    assert given.trusted_proxies == ("10.1.2.3", "10.2.0.0/16", "fd00::/8")


@pytest.mark.parametrize("line", ["secret", "ops:root:" + "a" * 64, "ops:admin:short", "ops:admin:" + "A" * 64])
def test_an_api_key_that_is_not_a_hash_is_refused_without_being_repeated(line: str) -> None:
    text = refused(api_keys=line)
    assert "NAME:SCOPE:SHA256" in text
    assert line not in text


def test_a_direct_address_alone_is_refused() -> None:
    assert "DATABASE_URL is not" in refused(database_direct_url=ADDRESS)


def test_shutdown_timeouts_beyond_the_grace_period_are_refused_with_their_sum() -> None:
    text = refused(drain_delay=20, drain_timeout=20, pause_timeout=20)
    assert "GRACE_PERIOD is 60 s" in text
    assert "80 s" in text


def test_a_pool_minimum_above_the_maximum_is_refused() -> None:
    assert "POOL_MIN (5) is larger than POOL_MAX (2)" in refused(pool_min=5, pool_max=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", "http"), ("port", 70000), ("drain_delay", -1), ("environment", "staging"), ("pool_max", 0)],
)
def test_the_error_of_an_invalid_value_names_the_setting(field: str, value: object) -> None:
    assert refused(**{field: value}).startswith(f"FLOTILLA_{field.upper()}: ")


def test_the_repr_of_the_settings_has_no_secrets() -> None:
    _, line = make_key("ops", "admin")
    shown = repr(Settings.load(database_url=ADDRESS, api_keys=line))
    assert "hunter2" not in shown
    assert line not in shown
