"""Differences between the vLLM versions this plugin has met. Each entry says when it can go."""

from __future__ import annotations

import vllm.v1.attention.backend as backend

# vLLM 0.23 wants sparse implementations to derive from a class of their own; 0.29 dropped it.
# Remove when the oldest supported vLLM is newer than 0.23.
SparseMLAImplBase = getattr(backend, "SparseMLAAttentionImpl", backend.MLAAttentionImpl)
