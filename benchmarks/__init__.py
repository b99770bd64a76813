"""Figures, printed by `make bench`: each measured here and now, beside what it is to be compared with."""
