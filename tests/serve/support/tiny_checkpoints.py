"""Small checkpoints for the serving tests: a random GLM-5 with an MTP layer, quantized by every type, and a Flash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.recipes import DYNAMIC, INT4, INT8, STATIC, linear, write_recipe
from tests.support.tiny_flash import tiny_flash_config, with_floats, write_tiny_flash
from tests.support.tiny_model import quantize_tiny, write_tokenizer

SPECIALS = [
    "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
]  # fmt: skip
#: Of the embeddings: the larger, the more the next token follows from the last one alone.
FLASH_SCALE = 8
TEMPLATE = "[gMASK]<sop>{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"


def write_float_checkpoint(directory: Path, indexers: str = "FFF", context: int = 4096) -> Path:
    """Random fp32 model; `indexers`: F = layer with an indexer, S = layer that shares the last one's choice (GLM-5.2).

    16 index heads: with fewer, exact score ties sit at the top-k border (serving-cpu.md 6).
    """
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, SPECIALS, TEMPLATE)
    torch.manual_seed(0)
    config = GlmMoeDsaConfig(
        vocab_size=512, hidden_size=192, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
        routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=96, qk_rope_head_dim=64, qk_nope_head_dim=32,
        v_head_dim=32, n_group=1, topk_group=1, norm_topk_prob=True, max_position_embeddings=context, index_topk=32,
        index_head_dim=128, index_n_heads=16, first_k_dense_replace=1, pad_token_id=0, bos_token_id=None,
        eos_token_id=[0, 4, 6], rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False, dtype="float32", scoring_func="sigmoid", topk_method="noaux_tc",
        indexer_rope_interleave=True, ep_size=1, moe_layer_freq=1, num_nextn_predict_layers=1,
        index_topk_pattern=indexers, indexer_types=["full" if kind == "F" else "shared" for kind in indexers],
    )  # fmt: skip
    model = GlmMoeDsaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            spread(name, tensor)
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    save_file(with_mtp_layer(load_file(path), config), path, metadata={"format": "pt"})
    return directory


def spread(name: str, tensor: torch.Tensor) -> None:
    """Fill one tensor so that logits are far apart and every part of the model matters."""
    if "e_score_correction_bias" in name:
        tensor.copy_(torch.randn(tensor.shape) * 0.05)
    elif tensor.ndim >= 2:
        factor = 1.0 if "embed" in name else (3.0 if "lm_head" in name else 2.0 if "indexer" in name else 1.0)
        tensor.copy_(torch.randn(tensor.shape) * factor * (1.0 if "embed" in name else tensor.shape[-1] ** -0.5))
    elif "norm" in name and not name.endswith("bias"):
        tensor.copy_(1.0 + 0.1 * torch.randn(tensor.shape))


def with_mtp_layer(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Add MTP layer L: the last decoder layer again, with an indexer, reading mostly the hidden state."""
    last, mtp = f"model.layers.{config.num_hidden_layers - 1}.", f"model.layers.{config.num_hidden_layers}."
    h = config.hidden_size
    extra = {mtp + name.removeprefix(last): t.clone() for name, t in tensors.items() if name.startswith(last)}
    full = f"model.layers.{max(n for n, kind in enumerate(config.indexer_types) if kind == 'full')}."
    indexer = {name: t.clone() for name, t in tensors.items() if name.startswith(f"{full}self_attn.indexer.")}
    extra |= {mtp + name.removeprefix(full): t for name, t in indexer.items()}
    extra[mtp + "eh_proj.weight"] = torch.cat([torch.zeros(h, h), torch.eye(h)], 1) + 0.01 * torch.randn(h, 2 * h)
    extra[mtp + "enorm.weight"], extra[mtp + "hnorm.weight"] = torch.ones(h), torch.ones(h)
    extra[mtp + "shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    extra[mtp + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    extra[mtp + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    return tensors | extra


def quantize_by_every_type(source: Path, directory: Path) -> Path:
    """Round to nearest by every type that can be served; returns the quantized checkpoint.

    Attention W8A8_DYNAMIC in the dense layer 0, W8A8 in the others; experts W4A8_DYNAMIC in layer 1, W8A8_DYNAMIC in 2.
    """
    float_ones = ("*kv_b_proj", "*wk", "*weights_proj", "*gate", "model.layers.{mtp}.*")
    dense = ("model.layers.{dense}.self_attn*", "*mlp*")
    recipe = write_recipe(
        directory / "recipe.yaml",
        linear(DYNAMIC, INT8, *dense, exclude=(*float_ones, "*mlp.experts.*")),
        linear(STATIC, INT8, "model.layers.{moe}.self_attn*", exclude=float_ones),
        linear(DYNAMIC, INT4, "model.layers.1.mlp.experts.*", exclude=float_ones),
        linear(DYNAMIC, INT8, "model.layers.2.mlp.experts.*", exclude=float_ones),
    )
    return quantize_tiny(source, directory / "quantized", str(recipe))


def write_flash(directory: Path) -> Path:
    """fp32 GLM-5.3-Flash; the next token follows mostly from the last one, which the MTP layer knows, too."""
    unstated = dict.fromkeys(("mhc", "mla_use_nope"))  # transformers leaves out what is always so
    write_tiny_flash(directory, dtype="float32", index_head_dim=128, max_position_embeddings=1024, **unstated)
    with_floats(directory)
    text = tiny_flash_config()["text_config"]
    (shard,) = directory.glob("*.safetensors")
    tensors, language = load_file(shard), "model.language_model."
    draft, hidden = f"{language}layers.{text['num_hidden_layers']}.", text["hidden_size"]
    tensors[f"{language}embed_tokens.weight"] *= FLASH_SCALE
    tensors[f"{draft}eh_proj.weight"] = torch.cat([FLASH_SCALE * torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    tensors[f"{draft}enorm.weight"] = torch.ones(hidden)
    tensors[f"{draft}shared_head.norm.weight"] = tensors[f"{language}norm.weight"].clone()
    tensors[f"{draft}embed_tokens.weight"] = tensors[f"{language}embed_tokens.weight"].clone()
    save_file(tensors, shard, {"format": "pt"})
    return directory
