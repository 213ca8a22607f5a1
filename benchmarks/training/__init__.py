"""Trains and measures the demo model: `python -m benchmarks.training OUT` in a clone."""
