"""Every error that the fleet raises, as one tree.

    FleetError                          the root
    ├── SettingsError                   a setting is unknown, invalid, or unsafe together with another
    │   ├── ActionInvalid               an action is declared wrongly, or two actions have the same name
    │   └── ResourceInvalid             a resource is declared wrongly, or two resources have the same type
    ├── DatabaseError                   the database cannot be used as it is
    │   ├── DatabaseUnreachable         no connection can be opened
    │   │   └── DatabaseAway            an outage at run time (`app.fleet.db.pool.pool`)
    │   ├── OutcomeUnknown              the connection broke before a change was confirmed
    │   ├── DatabaseTooOld              older than PostgreSQL 14
    │   ├── DatabaseReadOnly            a standby, or a demoted primary
    │   ├── DirectConnectionRequired    a pooler answers where a direct session is needed
    │   ├── DatabasesDiffer             the two addresses lead to different databases
    │   ├── IsolationUnsupported        the pooler's sessions are not READ COMMITTED
    │   ├── SchemaForeign               the namespace's schema was not created by Flotilla
    │   ├── SchemaOutdated              migrations are missing
    │   └── EmbeddedUnavailable         the embedded PostgreSQL cannot be started
    ├── RegistrationError               this instance may not join
    │   ├── NameTaken                   a living instance has this name
    │   └── WorkspaceTaken              a living instance has this workspace
    ├── StartRefused                    an instance that `flotilla up` started has ended
    ├── InstanceUnknown                 no living instance has this name
    ├── TemplateError                   an update from the template, or a new name, is impossible
    │   ├── ReleaseUnknown              the template has no such release, or its address is unknown
    │   ├── FencedFilesEdited           the repository has changed files that an update replaces
    │   └── NameInvalid                 not a name or title of a service, or already used for something else
    ├── EngineError                     a request about an action or a run is invalid
    │   ├── ActionUnknown               no action has this name
    │   ├── PayloadInvalid              the payload does not fit the action
    │   ├── AlreadyActive               overlap="skip", and a run of the action is pending or running
    │   ├── KeyReused                   the Idempotency-Key was used before, with another request
    │   ├── KeyInFlight                 the request with this Idempotency-Key is still being processed
    │   ├── NotJson                     a result, checkpoint or event that JSON cannot store
    │   ├── RunUnknown                  no run has this id, or it was deleted after its retention
    │   ├── EventUnknown                a run, or the feed, has no event with this number yet
    │   ├── FeedOff                     the feed is switched off
    │   └── RunNotReady                 the run's state does not allow the request
    ├── LockError                       a lock cannot be acquired, or was lost
    │   ├── LockInvalid                 an invalid name, ttl or other option
    │   ├── LockTaken                   the lock did not become free within the time to wait
    │   ├── LockCycle                   the task would wait for itself, directly or through another holder
    │   ├── LockLost                    the lock was lost while it was held
    │   └── LockUnknown                 no lock of this name is held
    ├── LimitError                      a limit refuses a call
    │   ├── LimitInvalid                an invalid name, rate or other option
    │   └── LimitReached                no permit became free within the time to wait
    ├── BreakerError                    a breaker refuses a call
    │   ├── BreakerInvalid              an invalid name, number or duration
    │   └── BreakerOpen                 the dependency failed too often and is not called for a while
    ├── RunFailed                       a run that `result()` waited for failed or was cancelled
    ├── ResourceFailed                  a resource of the service could not be opened
    ├── ResourceUnknown                 no resource of this type is open
    ├── Fenced                          another attempt owns the run; writes of this one are rejected
    ├── GiveUp                          raised by an action: fail now, a retry would not help
    ├── TryAgain                        raised by an action: retry, after a given time
    └── HttpError                       a refused HTTP request (branches: `app.fleet.edge.problems`)

The text of an error says what happened, to what, and what to do about it. `exit_code` is the exit code of the command
line. An instance that refuses to start exits with 3 whatever the error is, as uvicorn does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from app.fleet.duration import Duration, parse_wait


class FleetError(Exception):
    """The root of the tree; also raised by itself, for example for a call outside a running service."""

    exit_code = 1


class SettingsError(FleetError):
    """Raised at start-up for a wrong setting. Correct the setting that the text names."""

    exit_code = 2


class ActionInvalid(SettingsError):
    """Raised when an action is declared or the actions are loaded. Correct the declaration that the text names."""


class ResourceInvalid(SettingsError):
    """Raised when a resource is declared, or when the application is created. Correct what the text names."""


class DatabaseError(FleetError):
    """The root of the database's errors; by itself, PostgreSQL refused a statement. Run `flotilla doctor`."""

    exit_code = 4


class DatabaseUnreachable(DatabaseError):
    """Raised when no connection can be opened. Check the address, and that PostgreSQL runs."""


class OutcomeUnknown(DatabaseError):
    """Raised when the connection broke during a change. Check whether the change is there before you repeat it."""


class DatabaseTooOld(DatabaseError):
    """Raised at start-up, for a server older than PostgreSQL 14. Upgrade the server."""


class DatabaseReadOnly(DatabaseError):
    """Raised at start-up, when the address leads to a standby. Use the primary's address, or name all hosts."""


class DirectConnectionRequired(DatabaseError):
    """Raised at start-up, when a pooler answers the direct address. Set DATABASE_DIRECT_URL to PostgreSQL itself."""


class DatabasesDiffer(DatabaseError):
    """Raised at start-up, when the addresses lead to different databases. Let both lead to the same one."""


class IsolationUnsupported(DatabaseError):
    """Raised at start-up. Set `default_transaction_isolation` of the role or database to `read committed`."""


class SchemaForeign(DatabaseError):
    """Raised when the schema exists but was not created by Flotilla. Choose another FLOTILLA_NAMESPACE."""


class SchemaOutdated(DatabaseError):
    """Raised when migrations are missing and this process does not apply them. Run `flotilla migrate`."""


class EmbeddedUnavailable(DatabaseError):
    """Raised when the embedded PostgreSQL is not installed or does not start. Follow the text, or set DATABASE_URL."""


class RegistrationError(FleetError):
    """The root of the errors with which a start is refused by the register of instances."""

    exit_code = 3


class NameTaken(RegistrationError):
    """Raised at start-up. Choose another name, leave it unset, or stop the instance that has it."""


class WorkspaceTaken(RegistrationError):
    """Raised at start-up. Choose another workspace, stop the instance that has it, or share it with `--force`."""


class StartRefused(FleetError):
    """Raised by `flotilla up`. The text has the last lines of the instance's log."""

    exit_code = 3


class InstanceUnknown(FleetError):
    """Raised by `flotilla down NAME`. `flotilla list` shows the names."""

    exit_code = 5


class TemplateError(FleetError):
    """Raised by `flotilla update` and `flotilla rename`. Follow the text; nothing has changed."""


class ReleaseUnknown(TemplateError):
    """Raised by `flotilla update`, for a wrong `--to` or `--from`. The text names the releases that exist."""

    exit_code = 2


class FencedFilesEdited(TemplateError):
    """Raised by `flotilla update`. The text has the diff: undo these changes, or propose them to the template."""


class NameInvalid(TemplateError):
    """Raised by `flotilla rename`. Choose another name or title."""

    exit_code = 2


class EngineError(FleetError):
    """The root of the errors of actions and runs; by itself, an invalid key, priority, time or other option."""


class ActionUnknown(EngineError):
    """Raised for a name that no action has, or that no instance has registered yet. `flotilla actions` lists them."""

    exit_code = 5


class PayloadInvalid(EngineError):
    """Raised when a run is triggered. `errors` names each field and what is wrong with it: correct those fields."""

    exit_code = 2

    def __init__(self, text: str, errors: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(text)
        self.errors = list(errors)


class AlreadyActive(EngineError):
    """Raised by a trigger under overlap="skip". Wait for the active run `run_id`, or cancel it.

    `run_id` is None while the transaction that inserts the active run is still open.
    """

    def __init__(self, text: str, run_id: int | None) -> None:
        super().__init__(text)
        self.run_id = run_id


class KeyReused(EngineError):
    """Raised for a second request with the same Idempotency-Key and other contents. Use a new key for a new request."""


class KeyInFlight(EngineError):
    """Raised while the first request with this Idempotency-Key is being processed. Repeat the same request shortly."""


class NotJson(EngineError):
    """Raised for a result, checkpoint or event that JSON cannot store, or that is too large."""


class RunUnknown(EngineError):
    """Raised for an id that no run has, or whose run was deleted after its retention. `flotilla runs` lists them."""

    exit_code = 5


class EventUnknown(EngineError):
    """Raised when the last event seen does not exist (yet), as after a restored backup. Follow again from the start."""


class FeedOff(EngineError):
    """Raised when the feed is read and FLOTILLA_FEED_RETENTION is 0. Raise it, or follow single runs."""


class RunNotReady(EngineError):
    """Raised when a run cannot be cancelled because it has ended, or cannot be retried in its state."""


class LockError(FleetError):
    """The root of the errors of locks."""


class LockInvalid(LockError):
    """Raised for an invalid name, `ttl`, `wait` or `on_loss`, or for an empty reason of a forced release."""

    exit_code = 2


class LockTaken(LockError):
    """Raised when a lock did not become free in time. The text names the holder; wait longer, or try again later."""


class LockCycle(LockError):
    """Raised instead of a deadlock. Acquire locks in the same order everywhere, and none of them twice in a task."""


class LockLost(LockError):
    """Raised in the holder when its lock was lost. Let it rise: the next attempt acquires the lock anew."""


class LockUnknown(LockError):
    """Raised by a release of a lock that is not held. `flotilla locks` lists the locks that are."""

    exit_code = 5


class LimitError(FleetError):
    """The root of the errors of limits."""


class LimitInvalid(LimitError):
    """Raised for an invalid name, rate, burst or wait."""

    exit_code = 2


class LimitReached(LimitError):
    """Raised when no permit became free in time. Try again after `retry_after` seconds."""

    def __init__(self, text: str, retry_after: float) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class BreakerError(FleetError):
    """The root of the errors of breakers."""


class BreakerInvalid(BreakerError):
    """Raised for an invalid name, number or duration."""

    exit_code = 2


class BreakerOpen(BreakerError):
    """Raised instead of a call to a dependency that failed too often. Try again after `retry_after` seconds."""

    def __init__(self, text: str, retry_after: float) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class RunFailed(FleetError):
    """Raised by `result()` when the run `run_id` ended in the `state` failed or cancelled."""

    def __init__(self, message: str, run_id: int, state: str) -> None:
        super().__init__(message)
        self.run_id = run_id
        self.state = state


class ResourceFailed(FleetError):
    """Raised at start-up. The text has the resource and its error, and the log has the traceback: correct its cause."""


class ResourceUnknown(FleetError):
    """Raised by `provided`, and by a route with `Provided`. Declare a resource of this type in `app/startup.py`."""


class Fenced(FleetError):
    """Raised in an attempt that no longer owns its run. Let it rise: nothing that the attempt writes is committed."""


class GiveUp(FleetError):
    """Raise it in an action to fail the run now, without a retry."""


class TryAgain(FleetError):
    """Raise it in an action to retry the run after `after` (0 s to 366 days; default: the action's `retry_delay`)."""

    def __init__(self, text: str = "", *, after: Duration | None = None) -> None:
        super().__init__(text or "the action asked for another attempt")
        # In seconds. An action may assign to it later, so the executor checks it again.
        self.after = None if after is None else parse_wait(after)
