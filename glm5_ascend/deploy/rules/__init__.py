"""Combinations known to be bad, as data (deploy/rules.yaml), and the facts they are evaluated over."""
