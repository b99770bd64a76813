"""The service: your actions and routes, and the fleet they sail with."""

# The only place of the version: the project's metadata reads it from here.
__version__ = "0.2.0"
