"""A client of event streams that behaves like a browser's EventSource: it reconnects with `Last-Event-ID`."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.fleet import NO_TRUST


@dataclass
class Message:
    id: str | None = None
    event: str = "message"
    data: Any = None
    retry: int | None = None


def messages(lines: Iterable[str]) -> Iterator[Message]:
    """Parse the wire format, without its comments."""
    message = Message()
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                message.data = json.loads("\n".join(data))
            if data or message.retry is not None:
                yield message
            message, data = Message(), []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name in {"id", "event"}:
            setattr(message, name, value)
        elif name == "retry":
            message.retry = int(value)


@dataclass
class Watcher:
    """Follows one run across instances, and keeps the events that it received."""

    run_id: int
    received: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    connections: int = 0

    @property
    def last(self) -> str | None:
        return str(self.received[-1]["seq"]) if self.received else None

    def read(self, url: str, most: int | None = None) -> None:
        """Follow the run at this instance until it is done, the stream ends or breaks, or `most` events are there."""
        headers = {"Last-Event-ID": self.last} if self.last else {}
        self.connections += 1
        try:
            with httpx.stream(
                "GET", f"{url}/runs/{self.run_id}/events", headers=headers, timeout=30, verify=NO_TRUST
            ) as answer:
                assert answer.status_code == 200, answer.read()
                assert answer.headers["content-type"].startswith("text/event-stream")
                for message in messages(answer.iter_lines()):
                    if message.event == "done":
                        self.done = True
                        return
                    if message.id is not None:
                        assert message.id == str(message.data["seq"])
                        self.received.append(message.data)
                    if most is not None and len(self.received) >= most:
                        return
        except httpx.TransportError:
            pass

    @property
    def states(self) -> list[tuple[str, int, str | None]]:
        found = [each["data"] for each in self.received if each["kind"] == "state"]
        return [(each["state"], each["attempt"], each["instance"]) for each in found]

    @property
    def attempts(self) -> list[int]:
        return [attempt for state, attempt, _ in self.states if state == "running"]

    def is_complete(self) -> bool:
        return [each["seq"] for each in self.received] == list(range(1, len(self.received) + 1))
