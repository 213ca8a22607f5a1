"""A watch on garbage: known questions asked again and again, and what their answers and the metrics say."""
