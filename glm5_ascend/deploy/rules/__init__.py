"""Known bad combinations (deploy/rules.yaml), and the facts that their conditions use."""
