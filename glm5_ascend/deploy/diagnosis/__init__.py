"""What is installed here, what would serve, and what is in the way: machine, checkpoint and profile."""
