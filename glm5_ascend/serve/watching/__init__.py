"""Watches a server for garbage: asks known questions repeatedly and judges answers and metrics."""
