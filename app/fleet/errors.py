"""Every error the fleet raises, as one tree.

    FleetError                          something went wrong, and the text says what to do
    ├── SettingsError                   a setting is unknown, invalid, or unsafe together with another
    ├── DatabaseError                   the database cannot be used as it is
    │   ├── DatabaseUnreachable         no connection
    │   │   └── DatabaseAway            … any more, for the moment (`app.fleet.db.pool`)
    │   ├── DatabaseTooOld              older than PostgreSQL 14
    │   ├── DatabaseReadOnly            a standby, or a demoted primary
    │   ├── DirectConnectionRequired    a pooler stands where a direct session is needed
    │   ├── SchemaForeign               the namespace's schema belongs to something else
    │   ├── SchemaOutdated              migrations are missing
    │   └── EmbeddedUnavailable         the development database cannot be started
    ├── RegistrationError               this instance may not join
    │   ├── NameTaken                   a living instance has this name
    │   └── WorkspaceTaken              a living instance has this workspace
    ├── StartRefused                    an instance that `flotilla up` started ended again
    ├── InstanceUnknown                 no living instance has this name
    └── HttpError                       refused at the edge (`app.fleet.http.problems`, which has its branches)

An error is for the person who meets it: what happened, to what, and what to do about it. `exit_code` is what the
command line ends with; an instance that refuses to start ends with 3 whatever the reason, as uvicorn does.
"""


class FleetError(Exception):
    """The root of the tree."""

    exit_code = 1


class SettingsError(FleetError):
    exit_code = 2


class DatabaseError(FleetError):
    exit_code = 4


class DatabaseUnreachable(DatabaseError):
    pass


class DatabaseTooOld(DatabaseError):
    pass


class DatabaseReadOnly(DatabaseError):
    pass


class DirectConnectionRequired(DatabaseError):
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
