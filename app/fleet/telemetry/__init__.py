"""Logs, metrics and traces. Every other package of the fleet imports it; it imports none of them."""
