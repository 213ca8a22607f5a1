"""A random glm_moe_dsa checkpoint of every layer kind, small enough to be made in a test (< 1 MB, some 50 ms).

`write_tiny_model` has the hub's tensor names, an MTP layer, every key of config.json, and a byte-level tokenizer, so
that whatever takes a real checkpoint takes this one. torch, safetensors and tokenizers are imported when it is called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
#: GLM-5.2's schedule on four main layers: 0, 1, 2 and then every fourth own an indexer. Pass as overrides.
SHARED_INDEXER: dict[str, Any] = {
    "num_hidden_layers": 4,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "indexer_types": ["full", "full", "full", "shared"],
}
#: The only shard of a model, as long as no number of shards is asked for.
SHARD = "model-00001-of-00001.safetensors"
FP8_BLOCK = 128
FP8_KEYS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """config.json of the tiny model; `overrides` replace keys, None removes one."""
    config: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "qk_head_dim": 24,
        "head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 16,
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "moe_layer_freq": 1,
        "initializer_range": 0.02,
        "use_cache": True,
        "eos_token_id": [0],
        "pad_token_id": 0,
    }
    return {key: value for key, value in (config | overrides).items() if value is not None}


def write_tiny_model(directory: Path, *, dtype: str = "bfloat16", **options: Any) -> Path:
    """Write a checkpoint into `directory` (created) and return it.

    Args:
        dtype: "bfloat16", "float16", "float32", or "fp8": e4m3 blocks with `weight_scale_inv` for the linears.
        options: of `write_random_model`, such as `mtp_copies` (store the MTP layer's embedding and head, which a source
            may leave out); all others are keys of config.json, e.g. `**SHARED_INDEXER`.
    """
    names = ("shards", "index", "mtp_copies", "tokenizer", "seed")
    stored = {name: options.pop(name) for name in names if name in options}
    config = tiny_config(**{"dtype": "bfloat16" if dtype == "fp8" else dtype} | options)
    if dtype == "fp8":
        config["quantization_config"] = FP8_KEYS
    return write_random_model(directory, config, dtype=dtype, **stored)


def write_random_model(
    directory: Path,
    config: dict[str, Any],
    *,
    dtype: str,
    shards: int = 1,
    index: bool = True,
    mtp_copies: bool = True,
    tokenizer: bool = True,
    seed: int = 0,
    spelled: Callable[[str], str] = str,
) -> Path:
    """Write the tensors that `config` describes, random; `spelled` gives the name that each is stored by."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], "pad_token_id": 0}))
    tensors = _random_tensors(directory, mtp_copies, torch.Generator().manual_seed(seed))
    stored = {spelled(name): tensor for name, tensor in _store(tensors, dtype).items()}
    names, weight_map = list(stored), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: stored[name] for name in part}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if index:
        total = sum(tensor.nbytes for tensor in stored.values())
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(content))
    if tokenizer:
        write_tokenizer(directory)
    return directory


@contextmanager
def edited_tensors(directory: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a model with one shard, to be changed in place; its index stays as it is."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, torch.Tensor] = load_file(directory / SHARD)
    yield tensors
    save_file(tensors, directory / SHARD, {"format": "pt"})


def _random_tensors(directory: Path, mtp_copies: bool, generator: torch.Generator) -> dict[str, torch.Tensor]:
    import torch

    from glm5_ascend.model.config_file import load_config
    from glm5_ascend.model.spec import Linear, Parameter

    config = load_config(directory)
    size = config.sizes
    tensors: dict[str, torch.Tensor] = {}
    for prefix, part in config.all_weights():
        noise = torch.randn(part.shape(size), generator=generator)
        if isinstance(part, Linear):
            if prefix and part.name in config.spec.mtp_copies:
                if mtp_copies:
                    tensors[prefix + part.tensor_name] = tensors[f"{config.spec.mtp_copies[part.name]}.weight"].clone()
                continue
            noise = noise if part.role == "embedding" else noise * noise.shape[1] ** -0.5
        elif isinstance(part, Parameter):
            noise = noise * noise[0].numel() ** -0.5
        elif part.role in ("norm", "layernorm"):
            noise = (1 + 0.3 * noise).clamp_min(0.2)  # far from one: a gain folded wrongly must show
        else:
            noise = 0.1 * noise
        tensors[prefix + part.tensor_name] = noise
    return tensors


def _store(tensors: dict[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    import torch

    if dtype != "fp8":
        return {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") and "weights_proj" not in name and "eh_proj" not in name:
            stored[name], stored[f"{name}_scale_inv"] = fp8_blocks(tensor)
        else:
            stored[name] = tensor.to(torch.bfloat16)
    return stored


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 weight and fp32 scale of each 128x128 block, the last ones cut off."""
    import torch

    rows, columns = -(-weight.shape[0] // FP8_BLOCK), -(-weight.shape[1] // FP8_BLOCK)
    scale = torch.empty(rows, columns)
    out = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK), slice(j * FP8_BLOCK, (j + 1) * FP8_BLOCK))
            scale[i, j] = weight[at].abs().max() / 448
            out[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return out, scale


def write_tokenizer(directory: Path, special: Sequence[str] = SPECIAL_TOKENS, template: str = CHAT_TEMPLATE) -> None:
    """A tokenizer of GLM's markers, which come first, and single bytes, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special))
    core.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special[0],
        "pad_token": special[0],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(template)


@contextmanager
def edited_json(path: Path) -> Iterator[dict[str, Any]]:
    """The object of a JSON file, which is written again as it was changed."""
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


def change_json(path: Path, **values: Any) -> None:
    """Give keys of a JSON file other values."""
    with edited_json(path) as content:
        content |= values


def as_hub_cache(snapshot: Path) -> None:
    """Make every file of a snapshot a link into the blobs of the cache."""
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(p for p in snapshot.rglob("*") if p.is_file())):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))


def write_calibration(path: Path) -> Path:
    """Some hundred tokens of text and one conversation."""
    lines: list[Any] = [
        "def rotate(x, angle):\n    return x * math.cos(angle)\n" * 3,
        {"text": "The residual stream of a transformer carries few very large channels. " * 3},
        {
            "messages": [
                {"role": "user", "content": "What is 2 + 2?"},
                {"role": "assistant", "content": "4, of course."},
            ]
        },
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def quantize_tiny(source: Path, out: Path, recipe: str) -> Path:
    """Quantize `source` with a small calibration text into `out`; returns `out`."""
    from glm5_ascend.quantize.api import quantize

    calib = write_calibration(out.parent / "calib.jsonl")
    quantize(source, out, recipe=recipe, calib=calib, samples=4, seq_len=64)
    return out


def rotate_tiny(source: Path, out: Path) -> Path:
    """`source` with QuaRot and nothing else; returns `out`."""
    recipe = out.parent / "rotate.yaml"
    recipe.write_text(
        "apiversion: glm5_ascend_v1\nmetadata: {config_id: rotate}\nspec:\n  process:\n    - {type: quarot}\n"
    )
    return quantize_tiny(source, out, str(recipe))


def quantize_with_rot_in_shard(source: Path, out: Path) -> Path:
    """Quantize by `w4a8`; `rot.weight` lies in the first shard, where SGLang does not look for it."""
    from unittest.mock import patch

    from glm5_ascend.checkpoint.writer import ShardWriter
    from glm5_ascend.quantize import pipeline

    with patch.object(pipeline, "ShardWriter", lambda folder, specs, size, _: ShardWriter(folder, specs, size)):
        return quantize_tiny(source, out, "w4a8")
