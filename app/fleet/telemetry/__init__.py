"""Logs and metrics. Every other room imports it; it imports none of them."""
