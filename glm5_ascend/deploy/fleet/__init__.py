"""Replicas behind a running vllm-router: a server that hangs is taken out."""
