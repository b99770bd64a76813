"""The benchmarks of `make bench`. Each prints what it measured, beside the bar or the peers it is compared with."""
