"""The edge: every request passes its limits, authentication and audit; every error leaves it as a problem."""
