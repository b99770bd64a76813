"""The role of an instance: `FLOTILLA_ROLE`. All roles run the same code, from the same image.

    role     HTTP                              runs and singletons    inserts due slots       queues for leadership
    all      everything                        executes them          the leader; the         always
                                                                      others 1 s later
    worker   probes, `/health/instances`,      executes them          the same                always
             `/metrics`
    web      everything                        none                   3 s after the leader,   while no instance of
                                                                      or as the leader        another role does

So the requests of clients and the runs of actions have processes of their own, with limits and scaling of their own. An
instance of every role knows the actions of its code: a `web` instance checks and inserts runs that it never executes.
"""

import enum


class Role(enum.StrEnum):
    ALL = "all"
    WEB = "web"
    WORKER = "worker"

    @property
    def executes(self) -> bool:
        """Whether the instance claims and executes runs, and waits for singletons."""
        return self is not Role.WEB

    @property
    def serves(self) -> bool:
        """Whether the instance serves the routes that are neither for probes nor for metrics."""
        return self is not Role.WORKER
