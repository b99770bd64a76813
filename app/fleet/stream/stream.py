"""The stream of one instance: its relay, which sends notifications, and its hub, which receives them. Wired only here.

said:17,18                      these runs emitted something; `*` for very many
changed:17,18                   the state of these runs changed
following:                      a client follows something, so that notifications are of use
"""

from collections.abc import Sequence

from app.fleet.background import Service
from app.fleet.cluster.member import Member
from app.fleet.db.pool import Database
from app.fleet.stream.hub import Hub
from app.fleet.stream.relay import CHANGED, FOLLOWING, SAID, Relay


class Stream:
    def __init__(self, database: Database, member: Member) -> None:
        self.relay = Relay(database)
        self.hub = Hub(database, self.relay)
        member.on_notification(SAID, self.hub.runs_said)
        member.on_notification(CHANGED, self.hub.runs_changed)
        member.on_notification(FOLLOWING, lambda _: self.relay.heard_of_followers())
        member.on_linked(self.hub.look_at_all)

    @property
    def services(self) -> Sequence[Service]:
        """The services, in the order in which they start."""
        return (self.relay, self.hub)

    async def stop(self) -> None:
        for service in reversed(self.services):
            await service.stop()
