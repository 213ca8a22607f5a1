"""GLM-5's architecture, scaled down until the file fits a repository: that of the shipped demo model."""

from __future__ import annotations

import json
from typing import Any

from glm5_ascend.demo_model.resources import data_folder

STOP_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")


def stop_ids(tokenizer: Any) -> dict[str, Any]:
    """Ids of padding and of the three stop tokens, as a config has them."""
    stops = [tokenizer.convert_tokens_to_ids(token) for token in STOP_TOKENS]
    return {"pad_token_id": stops[0], "eos_token_id": stops}


def demo_config(tokenizer: Any, **changes: Any) -> Any:
    """A `GlmMoeDsaConfig` with every key that transformers, vLLM and vLLM-Ascend read.

    Args:
        tokenizer: gives the ids of padding and of the three stop tokens.
        changes: other values for single keys (tests build smaller models with them).
    """
    from transformers import GlmMoeDsaConfig

    shipped = json.loads((data_folder() / "config.json").read_text(encoding="utf-8"))
    for name in ("mlp_layer_types", "indexer_types"):
        del shipped[name]
    values = shipped | stop_ids(tokenizer) | changes
    layers, dense = values["num_hidden_layers"], values["first_k_dense_replace"]
    values.setdefault("mlp_layer_types", ["dense"] * dense + ["sparse"] * (layers - dense))
    values.setdefault("indexer_types", ["full"] * layers)
    return GlmMoeDsaConfig(**values)


def mtp_config(config: Any) -> Any:
    """Add one layer to a config, so that transformers' decoder layer class can build layer L."""
    from transformers import GlmMoeDsaConfig

    values = config.to_dict()
    layers = values["num_hidden_layers"] + 1
    values["num_hidden_layers"] = layers
    for key, kind in (("mlp_layer_types", "sparse"), ("indexer_types", "full")):
        values[key] = [*values[key], kind]
    values["layer_types"] = None
    extended = GlmMoeDsaConfig(**values)
    extended._attn_implementation = "eager"
    return extended
