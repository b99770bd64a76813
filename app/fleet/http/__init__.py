"""The HTTP API: the routes of the fleet, and what they share. Every request passes `app/fleet/edge` first."""
