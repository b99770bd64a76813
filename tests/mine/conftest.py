"""YOUR CODE: the fixtures of your tests. docs/guides/test.md says what `instance` can do."""

from app.fleet.testing.fixtures import *  # noqa: F403 — all fixtures, also those of later releases
