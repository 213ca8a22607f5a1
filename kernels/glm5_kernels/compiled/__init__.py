"""The ops compiled by numba, and what they share."""
