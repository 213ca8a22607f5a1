"""Between profiles and the planner: the profile or the commands that run a plan, and a plan of a profile."""
