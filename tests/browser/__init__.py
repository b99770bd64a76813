"""Tests of the dashboard in a real browser, against real instances."""
