"""The edge: what others see of an instance over HTTP."""
