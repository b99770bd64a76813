"""YOUR CODE: one file per action or family of actions."""
