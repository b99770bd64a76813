"""The long runs: a nemesis at work against instances, and a judge who goes by what they left behind."""
