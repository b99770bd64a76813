"""What the fleet says about itself: logs, metrics. Seen by every room, sees none."""
