"""Diagnosis of a machine, a checkpoint and a profile before a server starts."""
