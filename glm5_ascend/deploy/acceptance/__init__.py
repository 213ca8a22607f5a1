"""The first hour on a machine: steps in order, their figures, and where to report failures."""
