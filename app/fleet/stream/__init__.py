"""What happened in a run, in order, for whoever wants to know."""
