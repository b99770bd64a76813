"""Long runs with faults: a nemesis injects faults into instances, and a judge checks the effects in the database."""
