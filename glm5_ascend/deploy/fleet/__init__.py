"""Replicas behind vllm-router while they run: upgraded one by one, and taken out where they hang."""
