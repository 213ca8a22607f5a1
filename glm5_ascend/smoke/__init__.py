"""`glm5-ascend smoke URL`: does a running server answer sensibly? Asks any OpenAI-compatible vLLM, near or far."""
