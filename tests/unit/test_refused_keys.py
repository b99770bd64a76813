"""Unknown API keys are limited for each address, in a table of bounded size."""

import pytest

from app.fleet.edge.callers.refused_keys import MAX_ADDRESSES, MAX_UNKNOWN_KEYS, WINDOW, RefusedKeys


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


def test_an_address_may_send_some_unknown_keys_and_then_waits_until_its_window_ends(time: Time) -> None:
    keys = RefusedKeys(time)
    assert [keys.unknown_key("192.0.2.1") for _ in range(MAX_UNKNOWN_KEYS)] == [0.0] * MAX_UNKNOWN_KEYS
    time.now += 20
    assert keys.unknown_key("192.0.2.1") == WINDOW - 20
    assert keys.unknown_key("192.0.2.2") == 0.0
    time.now += WINDOW - 20
    assert keys.unknown_key("192.0.2.1") == 0.0


def test_the_table_is_bounded_and_all_further_addresses_share_one_entry(time: Time) -> None:
    keys = RefusedKeys(time)
    for number in range(MAX_ADDRESSES):
        keys.unknown_key(f"10.0.{number // 256}.{number % 256}")
    waits = [keys.unknown_key(f"10.1.{number // 256}.{number % 256}") for number in range(5000)]
    assert len(keys) == MAX_ADDRESSES + 1
    assert waits[MAX_UNKNOWN_KEYS - 1] == 0.0 < waits[MAX_UNKNOWN_KEYS]
    time.now += WINDOW
    assert keys.unknown_key("10.9.9.9") == 0.0
    assert len(keys) == 1


def test_the_addresses_of_one_network_of_ipv6_count_together(time: Time) -> None:
    keys = RefusedKeys(time)
    waits = [keys.unknown_key(f"2001:db8:0:1::{number:x}") for number in range(1, MAX_UNKNOWN_KEYS + 2)]
    assert waits[-1] > 0.0
    assert keys.unknown_key("2001:db8:0:2::1") == 0.0
    assert keys.unknown_key("::1") == 0.0


def test_all_invalid_addresses_are_counted_as_one(time: Time) -> None:
    keys = RefusedKeys(time)
    for number in range(100):
        keys.unknown_key(f"unix:{number}")
    assert len(keys) == 1
    assert keys.counts == {"unknown": 100}
