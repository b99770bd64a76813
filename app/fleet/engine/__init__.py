"""What an instance does with runs."""
