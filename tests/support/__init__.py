"""Support for the tests: real servers, processes and proxies."""
