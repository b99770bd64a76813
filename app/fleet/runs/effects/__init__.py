"""The parts that all transitions share: events, the row in the feed, the notification, conditions on the state."""
