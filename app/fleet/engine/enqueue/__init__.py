"""How a run comes to be: triggers, keys, and triggers whose outcome is known."""
