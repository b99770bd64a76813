"""YOUR CODE: the fixtures of your tests. docs/guides/test.md says what `instance` can do."""

from app.fleet.testing.fixtures import anyio_backend, databases, instance, instance_settings

__all__ = ["anyio_backend", "databases", "instance", "instance_settings"]
