"""The service: your actions and routes, and the fleet they sail with."""

# The one place that says it: the project's metadata reads it from here.
__version__ = "0.1.0"
