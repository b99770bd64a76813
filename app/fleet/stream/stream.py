"""The stream of one instance: its relay, which sends notifications, and its hub, which receives them. Wired only here.

emitted:17,18                   these runs emitted events; `*` for very many
changed:17,18                   the state of these runs changed
following:                      a client follows a run or the feed, so notifications are useful
"""

from collections.abc import Sequence

from app.fleet.background import Service
from app.fleet.cluster.member import Member
from app.fleet.db.pool.pool import Database
from app.fleet.stream.hub import Hub
from app.fleet.stream.relay import CHANGED, EMITTED, FOLLOWING, Relay


class Stream:
    def __init__(self, database: Database, member: Member) -> None:
        self.relay = Relay(database)
        self.hub = Hub(database, self.relay)
        # In the order in which they start.
        self.services: Sequence[Service] = (self.relay, self.hub)
        member.on_notification(EMITTED, self.hub.on_emitted)
        member.on_notification(CHANGED, self.hub.on_changed)
        member.on_notification(FOLLOWING, lambda _: self.relay.on_following())
        member.on_linked(self.hub.wake_for_all)

    async def stop(self) -> None:
        for service in reversed(self.services):
            await service.stop()
