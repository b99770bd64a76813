"""The life of a run: every statement that inserts a run or changes its state is in this package.

A run is a row of `runs` while it is pending or running. When it has succeeded, failed or been cancelled, it is a row of
`finished_runs`, with the same id.

    transition             statement                 sent by                  guard                     file
    (new) → pending        INSERT…                   trigger, batch, REST     key is free; with         insert.py
                                                                              overlap="skip", no run
                                                                              is active
    (new) → pending        INSERT_SLOTS              scheduler                slot has no run yet       insert.py
    pending → running      CLAIM, CLAIM_FEW          dispatcher               instance is live,         claim.py
                                                                              action not paused,
                                                                              limits allow it
    pending → running      CLAIM_ORDERED             dispatcher               also: first of its key,   claim_ordered.py
                                                                              none of it is running
    running → succeeded,   FINISH,                   run writer               token, `running`          end.py
      failed, cancelled    FINISH_SKIP_LOCKED
    running → succeeded    COMPLETE                  `run.commit`             token, `running`          end.py
    running → cancelled    END_CANCELLED             run writer, instead of   token, `running`,         end.py
                                                     REQUEUE                  cancellation requested
    running → pending      REQUEUE                   run writer: a retry or   token, `running`,         requeue.py
                                                     a pause                  no cancellation
                                                                              requested
    running → pending      UNDO_CLAIM                reconciler: the claim's  token, `running`          requeue.py
                                                     answer was lost
    running → pending,     RESCUE_ORPHANED           rescuer: its instance    `running`, instance       requeue.py
      failed, cancelled                              is gone                  is gone
    running → pending,     RESCUE_OVERDUE            rescuer: the deadline is `running`, deadline       requeue.py
      failed, cancelled                              long over                and a slack passed
    pending → cancelled    CANCEL_PENDING            operator                 `pending`                 cancel.py
    pending → pending      HURRY                     operator: due now        `pending`, due later      retry.py
    running → running      CANCEL_RUNNING            operator: a request      `running`                 cancel.py
    failed, cancelled      REVIVE, REVIVE_MANY       operator                 with overlap="skip", no   retry.py
      → pending                                                               run is active
    ended → (deleted)      PRUNE                     pruner                   retention is over         prune.py

Two guards are not conditions of the statement itself. For `overlap="skip"`, the transaction first takes the action's
advisory lock and looks for an active run (`overlap.py`). RESCUE_ORPHANED gets its instances from the transaction that
has declared them gone.

A statement that changes the state also does what belongs to the change: it draws the next number of the run's events
and adds a row to the feed (`effects/feed.py`). If an attempt is over, it stores the events of that attempt
(`effects/events.py`). If runs become pending, or the next run of an ordering key may be claimed, it notifies the
instances (`effects/notifications.py`).

Why a late writer cannot commit. Every write of an attempt requires its token *and* the state `running`. After a
takeover no row matches: the run is pending with the same token, or was claimed again with the next token, or has ended
and has no row in `runs`. `run.commit` sends COMPLETE in the transaction of the run's effects. If COMPLETE matches no
row, the transaction is rolled back, with the effects. If it matches, it has locked the row until the commit, and the
statements of a takeover (the rescues, and the next claim) skip locked rows. If one of them has locked the
row first, COMPLETE waits for it, and READ COMMITTED checks its condition again on the changed row.

`run.guard` locks the row FOR KEY SHARE (`attempt_writes.py`), with the same effect. REQUEUE, which the attempt itself
causes by failing, does not wait for that lock. The run is pending then, and the next claim skips its row until the
guarded transaction has ended.

The engine's part is `engine/execute/transactions.py`. `effects/states.py` says what a new state would touch.
"""
