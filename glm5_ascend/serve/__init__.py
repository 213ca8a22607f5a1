"""Serving: vLLM's command line and environment for GLM-5, our plugin inside it, and a client for its API."""
