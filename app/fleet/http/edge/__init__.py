"""What every request passes: limits, authentication and audit before the route, problems after it."""
