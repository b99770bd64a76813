"""The HTTP API: the routes of the fleet, and what they share. `edge/` is what every request passes."""
