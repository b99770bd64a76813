"""Event streams: this instance reads the events of runs and the feed, for the clients and the code that follow them."""
