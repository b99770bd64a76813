"""Cluster membership: which instances are live, and which one is the leader.

    link.py         the session that holds this instance's presence lock, in its own thread; heartbeat, notifications
    registry.py     the rows of the instances, and every change that is made to them
    leader.py       which instance is the leader; the leader declares an instance gone whose presence lock is free
    member.py       this instance, for the packages above: its identity, hooks for what happens to it, notifications
    anomalies.py    what an operator should look at
    direct session  `db/direct.py`: how a killed, frozen or disconnected process is noticed, and after how long

`engine/maintenance/rescuer.py` tells the whole way from SIGKILL to the next attempt of a run.
"""
