"""Whose headers name the client of a request, over TCP: the same under `flotilla serve` and under plain uvicorn."""

import httpx
import pytest

from app.fleet.edge.callers.refused_keys import MAX_UNKNOWN_KEYS
from tests.support.fleet import Fleet, InstanceProcess, Mode

API_KEYS = "root:admin:" + "0" * 64
CLIENT, FORGED = "198.51.100.7", "203.0.113.9"


def seen(instance: InstanceProcess, *forwarded: str, proto: str | None = None) -> list[str | None]:
    """Return the client, the proxy and the scheme of a request with these headers, as a route sees them."""
    headers = [("x-forwarded-for", each) for each in forwarded] + ([("x-forwarded-proto", proto)] if proto else [])
    answer = httpx.get(f"{instance.url}/trial/client", headers=headers)
    assert answer.status_code == 200, answer.text
    found: list[str | None] = answer.json()
    return found


def try_key(instance: InstanceProcess, forwarded: str) -> int:
    headers = {"x-forwarded-for": forwarded, "x-api-key": "guess"}
    return httpx.get(f"{instance.url}/actions", headers=headers).status_code


@pytest.mark.parametrize("mode", ["serve", "uvicorn"])
def test_without_the_setting_no_header_is_believed_from_this_machine_either(fleet: Fleet, mode: Mode) -> None:
    (instance,) = fleet.start(1, mode, FORWARDED_ALLOW_IPS="*")
    assert seen(instance, FORGED, proto="https") == ["127.0.0.1", None, "http"]


@pytest.mark.parametrize("mode", ["serve", "uvicorn"])
def test_the_client_is_the_last_address_that_is_no_trusted_proxy(fleet: Fleet, mode: Mode) -> None:
    (instance,) = fleet.start(1, mode, FLOTILLA_TRUSTED_PROXIES="127.0.0.1,10.1.0.0/16")
    assert seen(instance, CLIENT, proto="https") == [CLIENT, "127.0.0.1", "https"]
    assert seen(instance, f"{FORGED}, {CLIENT}, 10.1.2.3") == [CLIENT, "127.0.0.1", "http"]
    assert seen(instance, FORGED, f"{CLIENT}, 10.1.2.3") == [CLIENT, "127.0.0.1", "http"]
    assert seen(instance, f"10.1.9.9, {FORGED}, {CLIENT}") == [CLIENT, "127.0.0.1", "http"]
    assert seen(instance) == ["127.0.0.1", "127.0.0.1", "http"]


def test_a_peer_that_is_no_trusted_proxy_is_the_client_whatever_it_sends(fleet: Fleet) -> None:
    (instance,) = fleet.start(FLOTILLA_TRUSTED_PROXIES="10.1.0.0/16")
    assert seen(instance, "10.1.2.3", proto="https") == ["127.0.0.1", None, "http"]


def test_unknown_keys_are_limited_for_each_client_behind_the_proxy(fleet: Fleet) -> None:
    (instance,) = fleet.start(FLOTILLA_TRUSTED_PROXIES="127.0.0.1", FLOTILLA_API_KEYS=API_KEYS)
    assert [try_key(instance, CLIENT) for _ in range(MAX_UNKNOWN_KEYS)] == [401] * MAX_UNKNOWN_KEYS
    # A forged address to the left of its own does not make it another client.
    assert [try_key(instance, CLIENT), try_key(instance, f"{FORGED}, {CLIENT}")] == [429, 429]
    assert try_key(instance, FORGED) == 401
