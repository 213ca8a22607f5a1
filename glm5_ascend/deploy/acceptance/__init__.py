"""The first hour on a machine: steps in order, a journal to resume from, and where to report failures."""
