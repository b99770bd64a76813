"""Callers: who sends a request, and the addresses that send unknown API keys. `edge/auth.py` finds the caller."""
