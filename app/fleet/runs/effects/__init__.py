"""What every transition of a run also does: its events, its row in the feed, the notification, and the conditions."""
