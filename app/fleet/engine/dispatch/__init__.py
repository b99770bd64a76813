"""How runs reach an instance: due slots become pending runs, and pending runs are claimed.

    scheduler.py       inserts the runs of due slots
    dispatcher.py      when this instance claims, and how many runs
    backlog.py         which queues may have runs to claim, in which order
    claimant.py        how many runs a claim takes from each queue; limits
    ordered.py         ordered runs: the scan of ordering keys

What is claimed next: no instance decides for the others. Each claims for its own free slots: four runs first, and four
times as many after each claim that was full. It claims nothing while it drains, while its link does not hold, and while
its scheduler inserts very many runs. The rules:

    1  due queues: the highest priority first, then the queue in which a run waits longest, as far as this instance
       knows (its floor, by the second), then from a random one on
    2  in a priority, each queue has an equal share of the claim; what it leaves goes to the others, then to lower
       priorities. If the priority has ordered queues and others, the two kinds take turns: one has all the room first
    3  in a queue: by `run_at`, then by id, without rows that another session has locked; none of a paused action
    4  of an ordering key: only the unfinished run with the lowest id, if it is due and no run of the key is running;
       while it waits for a retry or a later `run_at`, the key waits
    5  an action with limits: under a lock of its row, as many as the limits allow
    6  together at most 16 MiB of payloads and checkpoints
"""
