"""The engine: everything that an instance does with actions and runs. `engine.py` creates and connects the parts.

actions/        declarations of actions, and their rows in the database
enqueue/        a trigger becomes a pending run
dispatch/       due slots become pending runs; pending runs are claimed
execute/        claimed runs are executed, and what they write is written in batches
figures/        what the metrics show about runs and about the cluster
maintenance/    lost notifications, dead instances, old rows
once/           a key is processed once
"""
