"""What `GET /metrics` and the charts of the dashboard show about runs, and about the whole cluster."""
