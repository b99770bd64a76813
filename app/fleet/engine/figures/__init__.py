"""What `GET /metrics` shows about runs, and about the whole cluster."""
