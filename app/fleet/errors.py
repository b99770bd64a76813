"""Every error the fleet raises, as one tree.

    FleetError                          something went wrong, and the text says what to do
    ├── SettingsError                   a setting is unknown, invalid, or unsafe together with another
    │   └── ActionInvalid               an action is declared wrongly, or two have one name
    ├── DatabaseError                   the database cannot be used as it is
    │   ├── DatabaseUnreachable         no connection
    │   │   └── DatabaseAway            … any more, for the moment (`app.fleet.db.pool`)
    │   ├── OutcomeUnknown              the connection broke before a change was confirmed
    │   ├── DatabaseTooOld              older than PostgreSQL 14
    │   ├── DatabaseReadOnly            a standby, or a demoted primary
    │   ├── DirectConnectionRequired    a pooler stands where a direct session is needed
    │   ├── DatabasesDiffer             the two addresses lead to different databases
    │   ├── IsolationUnsupported        the pooler's sessions are not READ COMMITTED
    │   ├── SchemaForeign               the namespace's schema belongs to something else
    │   ├── SchemaOutdated              migrations are missing
    │   └── EmbeddedUnavailable         the development database cannot be started
    ├── RegistrationError               this instance may not join
    │   ├── NameTaken                   a living instance has this name
    │   └── WorkspaceTaken              a living instance has this workspace
    ├── StartRefused                    an instance that `flotilla up` started ended again
    ├── InstanceUnknown                 no living instance has this name
    ├── EngineError                     what was asked of an action or a run cannot be
    │   ├── ActionUnknown               no action has this name
    │   ├── PayloadInvalid              the payload does not fit the action
    │   ├── AlreadyActive               overlap="skip", and a run of it waits or runs
    │   ├── KeyReused                   another request came with this Idempotency-Key before
    │   ├── KeyInFlight                 the request with this Idempotency-Key is still being worked on
    │   ├── NotJson                     a result, checkpoint or event that cannot be stored as JSON
    │   ├── RunUnknown                  no run has this id, or it was forgotten
    │   ├── EventUnknown                a run, or the feed, has no event of that number yet
    │   ├── FeedOff                     the feed is switched off
    │   └── RunNotReady                 the run is not in a state for that
    ├── LockError                       a lock is not to be had, or not any more
    │   ├── LockInvalid                 a name, a ttl or another option that cannot be
    │   ├── LockTaken                   it was not free within the time to wait
    │   ├── LockCycle                   who holds it waits for this very task; or this task has it already
    │   ├── LockLost                    it is somebody else's by now, or may be
    │   └── LockUnknown                 nobody holds a lock of this name
    ├── LimitError                      a limit lets nothing through
    │   ├── LimitInvalid                a name, a rate or another option that cannot be
    │   └── LimitReached                no permit comes within the time to wait
    ├── BreakerError                    a breaker lets nothing through
    │   ├── BreakerInvalid              a name, a number or a duration that cannot be
    │   └── BreakerOpen                 what it is for failed too often, and is left alone for a while
    ├── RunFailed                       a run that somebody waited for ended, and not well
    ├── Fenced                          this attempt was superseded; nothing it writes counts any more
    ├── GiveUp                          raised by an action: fail now, another attempt would not help
    ├── TryAgain                        raised by an action: another attempt, after so long
    └── HttpError                       refused at the edge (`app.fleet.http.edge.problems`, which has its branches)

An error is for the person who meets it: what happened, to what, and what to do about it. `exit_code` is what the
command line ends with; an instance that refuses to start ends with 3 whatever the reason, as uvicorn does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from app.fleet.duration import Duration, parse_wait


class FleetError(Exception):
    """The root of the tree."""

    exit_code = 1


class SettingsError(FleetError):
    exit_code = 2


class ActionInvalid(SettingsError):
    pass


class DatabaseError(FleetError):
    exit_code = 4


class DatabaseUnreachable(DatabaseError):
    pass


class OutcomeUnknown(DatabaseError):
    pass


class DatabaseTooOld(DatabaseError):
    pass


class DatabaseReadOnly(DatabaseError):
    pass


class DirectConnectionRequired(DatabaseError):
    pass


class DatabasesDiffer(DatabaseError):
    pass


class IsolationUnsupported(DatabaseError):
    pass


class SchemaForeign(DatabaseError):
    pass


class SchemaOutdated(DatabaseError):
    pass


class EmbeddedUnavailable(DatabaseError):
    pass


class RegistrationError(FleetError):
    exit_code = 3


class NameTaken(RegistrationError):
    pass


class WorkspaceTaken(RegistrationError):
    pass


class StartRefused(FleetError):
    exit_code = 3


class InstanceUnknown(FleetError):
    exit_code = 5


class EngineError(FleetError):
    pass


class ActionUnknown(EngineError):
    exit_code = 5


class PayloadInvalid(EngineError):
    """`errors` names each field and what is wrong with it."""

    exit_code = 2

    def __init__(self, text: str, errors: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(text)
        self.errors = list(errors)


class AlreadyActive(EngineError):
    """`run_id` is the run that is active; None while the transaction that makes it is still open."""

    def __init__(self, text: str, run_id: int | None) -> None:
        super().__init__(text)
        self.run_id = run_id


class KeyReused(EngineError):
    pass


class KeyInFlight(EngineError):
    pass


class NotJson(EngineError):
    pass


class RunUnknown(EngineError):
    exit_code = 5


class EventUnknown(EngineError):
    pass


class FeedOff(EngineError):
    pass


class RunNotReady(EngineError):
    pass


class LockError(FleetError):
    pass


class LockInvalid(LockError):
    exit_code = 2


class LockTaken(LockError):
    pass


class LockCycle(LockError):
    pass


class LockLost(LockError):
    pass


class LockUnknown(LockError):
    exit_code = 5


class LimitError(FleetError):
    pass


class LimitInvalid(LimitError):
    exit_code = 2


class LimitReached(LimitError):
    """`retry_after` is in how many seconds a permit may be free."""

    def __init__(self, text: str, retry_after: float) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class BreakerError(FleetError):
    pass


class BreakerInvalid(BreakerError):
    exit_code = 2


class BreakerOpen(BreakerError):
    """`retry_after` is in how many seconds somebody may try again."""

    def __init__(self, text: str, retry_after: float) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class RunFailed(FleetError):
    """Raised by `result()`; `run_id` and `state` say which run, and how it ended."""

    def __init__(self, message: str, run_id: int, state: str) -> None:
        super().__init__(message)
        self.run_id = run_id
        self.state = state


class Fenced(FleetError):
    pass


class GiveUp(FleetError):
    pass


class TryAgain(FleetError):
    """`after` is how long to wait, from 0 s to 366 days; without it, the action's usual wait applies."""

    def __init__(self, text: str = "", *, after: Duration | None = None) -> None:
        super().__init__(text or "asked to be tried again")
        # In seconds. Whatever it is set to later, the executor checks it again before it uses it.
        self.after = None if after is None else parse_wait(after)
