"""The life of a run: every statement that inserts a run or changes its state is in this room.

A run is a row of `runs` while it is pending or running, and a row of `finished_runs` afterwards.

    from        to          who                       guard                              file
    -           pending     trigger, batch, REST      key not used before; with          insert.py
                                                      overlap="skip", none is active
    -           pending     scheduler                 unique key of the slot             insert.py
    pending     running     dispatcher                instance live, action not          claim.py
                                                      paused, limits allow it
    pending     running     dispatcher                also: head of its ordering key,    claim_ordered.py
                                                      unique index
    running     finished    run writer, run.commit    token, `running`                   end.py
    running     pending     run writer: retry, pause  token, `running`, no request to    requeue.py
                                                      cancel
    running     pending     reconciler: lost claim    token, `running`                   requeue.py
    running     pending     rescuer: instance gone    instance declared gone             requeue.py
    running     pending     rescuer: overdue          deadline passed, plus a slack      requeue.py
    pending     cancelled   operator                  `pending`                          cancel.py
    running     running     operator requests a       `running`; the end follows as      cancel.py
                            cancellation              for the run writer
    finished    pending     operator                  failed or cancelled; with          retry.py
                                                      overlap="skip", none is active
    finished    -           pruner                    retention is over                  prune.py

Each statement also does what belongs to the change: it draws the next number of the run's events, adds a row to the
feed (`effects/feed.py`), stores the events of an attempt that is over (`effects/events.py`), and notifies the instances
that runs are pending (`effects/notifications.py`).

A claim increments the token. Writes with an older token match no row (`writes.py`, `effects/events.py`, `end.py`).
"""
