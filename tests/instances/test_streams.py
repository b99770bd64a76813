"""Every instance streams every run, with the same events; a client of a killed instance continues at another."""

import random
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.fleet import Fleet, InstanceProcess
from tests.support.postgres import Postgres, eventually
from tests.support.rounds import rounds
from tests.support.streams import Watcher, messages

ROUNDS = rounds(50)


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS="tests.support.trial_actions", FLOTILLA_POOL_MAX="8") as own:
        yield own


@pytest.mark.parametrize("workers", [0, 4])
def test_clients_of_different_instances_receive_the_same_events_of_a_run(fleet: Fleet, workers: int) -> None:
    instances = [fleet.launch("workers", workers=workers).wait_ready()] if workers else fleet.start(4)
    urls = [instance.url for instance in instances] * (4 // len(instances))
    run_id = instances[0].trigger("chatter", {"count": 40, "pause": 0.05})["id"]
    watchers = [Watcher(run_id) for _ in urls]
    with ThreadPoolExecutor(len(urls)) as pool:
        list(pool.map(Watcher.read, watchers, urls))
    late = Watcher(run_id)
    late.read(instances[-1].url)
    for watcher in (*watchers, late):
        assert watcher.done
        assert watcher.received == watchers[0].received
    assert late.is_complete()
    assert [state for state, _, _ in late.states] == ["pending", "running", "succeeded"]
    assert [each["data"]["n"] for each in late.received if each["kind"] == "said"] == list(range(40))


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_clients_see_a_run_move_to_another_instance_and_no_event_of_the_old_one(fleet: Fleet, how: str) -> None:
    instances = fleet.start(3)
    # The first attempt would emit for hours.
    run_id = instances[0].trigger("chatter", {"count": 80, "pause": 0.05, "first": 1_000_000})["id"]
    owner = owner_of(instances, run_id)
    others = [instance for instance in instances if instance is not owner]
    name, watchers = owner.me()["name"], [Watcher(run_id) for _ in others]
    with ThreadPoolExecutor(len(others)) as pool:
        reading = [pool.submit(watcher.read, instance.url) for watcher, instance in zip(watchers, others, strict=True)]
        eventually(lambda: len(watchers[0].received) > 10)
        owner.kill() if how == "killed" else owner.freeze()
        eventually(lambda: watchers[0].attempts == [1, 2])
        if how == "frozen":
            owner.thaw()
            eventually(lambda: owner.lines("run.fenced") or owner.lines("identity.lost"))
        for each in reading:
            each.result(60)
    for watcher in watchers:
        assert watcher.done
        assert watcher.is_complete()
        assert watcher.received == watchers[0].received
    states = watchers[0].states
    assert [(state, attempt) for state, attempt, _ in states] == [
        ("pending", 0),
        ("running", 1),
        ("pending", 1),
        ("running", 2),
        ("succeeded", 2),
    ]
    assert states[1][2] == name
    assert states[3][2] in {instance.me()["name"] for instance in others}
    taken_over = next(
        place for place, each in enumerate(watchers[0].received) if each["data"].get("state") == "pending"
    )
    said = [each["data"]["attempt"] for each in watchers[0].received[taken_over + 6 :] if each["kind"] == "said"]
    assert set(said[-80:]) == {2}


@pytest.mark.rounds
@pytest.mark.long
def test_a_client_whose_instance_ends_continues_at_another_and_misses_no_event(fleet: Fleet) -> None:
    """Instances are killed and terminated in turn; the client continues at another one with `Last-Event-ID`.

    The test takes long because seventeen instances start one after the other, and fifty in `make chaos`.
    """
    chance = random.Random(4)
    instances = fleet.start(3)
    run_id = instances[0].trigger("chatter", {"count": 1_000_000, "pause": 0.02})["id"]
    watcher = Watcher(run_id)
    for number in range(ROUNDS):
        # The oldest instance; its replacement starts while the client follows at the next one.
        instance = instances.pop(0).wait_ready()
        reading = threading.Thread(target=watcher.read, args=(instance.url,))
        reading.start()
        for _ in range(chance.choice([1, 1, 5])):
            eventually(partial(has_more, watcher, len(watcher.received)), within=60)
        instance.kill() if number % 2 else instance.terminate()
        instances.append(fleet.launch())
        reading.join(60)
        assert not reading.is_alive()
        assert not watcher.done
    instance = instances.pop(0).wait_ready()
    instance.client.post(f"/runs/{run_id}/cancel")
    watcher.read(instance.url)
    assert watcher.done
    assert watcher.is_complete()
    assert watcher.connections == ROUNDS + 1
    assert watcher.states[-1][0] == "cancelled"


def has_more(watcher: Watcher, before: int) -> bool:
    return len(watcher.received) > before


def owner_of(instances: Sequence[InstanceProcess], run_id: int) -> InstanceProcess:
    name = eventually(lambda: instances[0].run(run_id)["instance"])
    return next(instance for instance in instances if instance.me()["name"] == name)


def test_a_stream_pauses_during_a_database_outage_and_then_continues(own_postgres: Postgres, tmp_path: Path) -> None:
    with Fleet(own_postgres.new_database(), tmp_path, FLOTILLA_ACTIONS="tests.support.trial_actions") as fleet:
        instances = fleet.start(2)
        run_id = instances[0].trigger("chatter", {"count": 80, "pause": 0.05})["id"]
        watchers = [Watcher(run_id) for _ in instances]
        with ThreadPoolExecutor(2) as pool:
            reading = [
                pool.submit(watcher.read, instance.url) for watcher, instance in zip(watchers, instances, strict=True)
            ]
            eventually(lambda: len(watchers[0].received) > 10)
            own_postgres.stop("immediate")
            own_postgres.start_again()
            for each in reading:
                each.result(60)
        for watcher in watchers:
            assert watcher.done
            assert watcher.connections == 1
            assert watcher.is_complete()
            assert watcher.received == watchers[0].received
        assert watchers[0].attempts == [1]


def test_the_feed_is_the_same_at_every_instance_and_continues_at_another(fleet: Fleet) -> None:
    instances = fleet.start(2)
    received: dict[str, list[tuple[str, int, int, str]]] = {instance.url: [] for instance in instances}

    def read(url: str, last: str | None, count: int) -> None:
        headers = {} if last is None else {"Last-Event-ID": last}
        with httpx.stream("GET", f"{url}/events?action=echo", headers=headers, timeout=30) as answer:
            assert answer.status_code == 200
            for message in messages(answer.iter_lines()):
                assert message.id is not None
                data = message.data
                received[url].append((message.id, data["run"], data["seq"], data["data"]["state"]))
                assert data["action"] == "echo"
                if len(received[url]) == count:
                    return

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read, instance.url, "0", 60) for instance in instances]
        for number in range(20):
            instances[number % 2].trigger("noop")
            run_id = instances[number % 2].trigger("echo")["id"]
        for each in reading:
            each.result(60)
    first, second = received.values()
    assert first == second
    for run_id in {run_id for _, run_id, _, _ in first}:
        assert [change[2:] for change in first if change[1] == run_id] == [
            (1, "pending"),
            (2, "running"),
            (3, "succeeded"),
        ]
    # A third client begins in the middle, at the second instance.
    received[instances[1].url] = []
    read(instances[1].url, first[24][0], 35)
    assert received[instances[1].url] == first[25:]


def test_streams_over_the_limit_are_refused_and_other_requests_are_answered(fleet: Fleet) -> None:
    (instance,) = fleet.start(FLOTILLA_STREAMS="20", FLOTILLA_STREAMS_PER_KEY="20")
    run_id = instance.trigger("nap", {"seconds": 600})["id"]
    request = f"GET /runs/{run_id}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with ExitStack() as stack:
        for number in range(1020):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", instance.port), timeout=30))
            client.sendall(request)
            answer = client.recv(4096)
            if number < 20:
                assert answer.startswith(b"HTTP/1.1 200")
            else:
                assert answer.startswith(b"HTTP/1.1 503")
                assert b"retry-after: 5" in answer
                client.close()
        assert instance.run(run_id)["state"] == "running"
    eventually(lambda: stream_status(instance, run_id) == 200)
    instance.wait_ready()


def stream_status(instance: InstanceProcess, run_id: int) -> int:
    with httpx.stream("GET", f"{instance.url}/runs/{run_id}/events", timeout=30) as answer:
        return answer.status_code


def test_a_client_that_does_not_read_is_disconnected(fleet: Fleet) -> None:
    (instance,) = fleet.start(TRIAL_STALLED="0.5")
    run_id = trigger_more_than_buffers_hold(instance)
    with client_that_does_not_read(instance, run_id):
        (cut,) = eventually(lambda: instance.lines("stream.cut"))
        assert cut["path"] == f"/runs/{run_id}/events"
        reader = Watcher(run_id)
        reader.read(instance.url)
        assert reader.is_complete()
        eventually(lambda: "flotilla_streams 0.0\n" in instance.client.get("/metrics").text)
    assert not instance.errors()


def test_a_client_that_does_not_read_does_not_delay_a_drain(fleet: Fleet) -> None:
    # So long that a drain that waited for the client would not end in time.
    (instance,) = fleet.start(FLOTILLA_DRAIN_TIMEOUT="600", FLOTILLA_GRACE_PERIOD="700")
    run_id = trigger_more_than_buffers_hold(instance)
    with client_that_does_not_read(instance, run_id):
        # The stream of the stalled client is stuck when another client has read everything.
        reader = Watcher(run_id)
        reader.read(instance.url)
        instance.terminate()
        assert instance.wait_exit() in {0, -signal.SIGTERM}
    assert len(instance.lines("stream.cut")) == 1
    assert not instance.errors()


def trigger_more_than_buffers_hold(instance: InstanceProcess) -> int:
    run_id: int = instance.trigger("chatter", {"count": 400, "pause": 0.0, "padding": 60_000})["id"]
    instance.ended(run_id, within=60)
    return run_id


@contextmanager
def client_that_does_not_read(instance: InstanceProcess, run_id: int) -> Iterator[None]:
    """Connect a client that requests the events of a run and does not read them."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", instance.port))
        client.sendall(f"GET /runs/{run_id}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 200"
        yield
