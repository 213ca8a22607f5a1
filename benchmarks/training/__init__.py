"""Trains and measures the demo model: `python -m benchmarks.training.train OUT` in a clone."""
