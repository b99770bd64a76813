"""YOUR CODE: your actions, one file for each action or family of actions."""
