"""Write a random GLM-5 or GLM-5.3-Flash checkpoint of real or middle size: what speed and memory are measured on.

    python benchmarks/tools/make_model.py OUT --preset real --experts 64    # one dense and one MoE layer of GLM-5
    python benchmarks/tools/make_model.py OUT --preset mid                  # 0.67 GB; flash: two of GLM-5.3-Flash
    python benchmarks/tools/make_model.py OUT --preset real --layers 78 --dense 3 --mtp 1 --hollow    # for --dry-run
    python benchmarks/tools/make_model.py OUT --recipe w4a8 --family glm-5         # 418 GB of zeros: serve, rehearse

Rows have spread scales and a few input channels are outliers (norm gains up, columns of their readers down), so that
rotation and smoothing have something to do. `--dtype fp8` writes e4m3 with one scale per 128x128 block. Weights come
from a seed, tensor by tensor: any shard can be made again.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from glm5_ascend.checkpoint.index import INDEX_NAME
from glm5_ascend.checkpoint.output import copy_serving_files, file_facts
from glm5_ascend.checkpoint.shards import Shard
from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME, ROT_FILE, ROT_NAME
from glm5_ascend.checkpoint.writer import TensorSpec, shard_header, write_json
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_file import load_config, parse_config
from glm5_ascend.model.glm5_next import GLM5_NEXT
from glm5_ascend.model.spec import Linear, Parameter, Vector, Weight
from glm5_ascend.plan.model import family as planner_family
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.provenance import write_provenance
from glm5_ascend.quantize.recipe import find_recipe, load_recipe
from glm5_ascend.quantize.run.store import ROTATION_FILE

SHARD_BYTES = 1_000_000_000
OUTLIERS = 6
ROTATION = "global_rotation"
#: Of the tokenizer: three special ones, and every byte.
TOKENS = 259
GLM5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
    "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 2,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "num_attention_heads": 64, "num_key_value_heads": 64,
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "qk_head_dim": 256,
    "head_dim": 64, "v_head_dim": 256, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "vocab_size": 154880,
    "rms_norm_eps": 1e-5, "rope_interleave": True, "indexer_rope_interleave": True, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "max_position_embeddings": 202752,
    "attention_bias": False, "tie_word_embeddings": False, "ep_size": 1, "moe_layer_freq": 1, "pad_token_id": 0,
    "eos_token_id": [2], "use_cache": True,
}  # fmt: skip
#: The model of the reference times of msModelSlim.
MID: dict[str, Any] = GLM5 | {
    "hidden_size": 3072, "intermediate_size": 6144, "moe_intermediate_size": 1024, "num_nextn_predict_layers": 1,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 1024, "n_routed_experts": 8,
    "num_experts_per_tok": 4, "index_n_heads": 16, "vocab_size": 1024, "max_position_embeddings": 4096,
}  # fmt: skip
#: The smallest that msModelSlim takes: its indexer wants heads of 128.
TINY: dict[str, Any] = MID | {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "qk_head_dim": 64, "head_dim": 32, "v_head_dim": 64, "num_experts_per_tok": 2,
    "index_n_heads": 4, "index_topk": 64,
}  # fmt: skip
#: GLM-5.3-Flash; `config_keys` adds the types of its layers.
FLASH: dict[str, Any] = {
    "architectures": [GLM5_NEXT.architecture], "model_type": GLM5_NEXT.model_type, "tie_word_embeddings": False,
    "image_token_id": 300, "video_token_id": 301,
    "text_config": {key: value for key, value in GLM5_NEXT.defaults.items() if not key.startswith("linear_")} | {
        "dtype": "bfloat16", "num_hidden_layers": 2, "num_nextn_predict_layers": 0, "first_k_dense_replace": 1,
        "index_kpool": 4, "eos_token_id": [2], "pad_token_id": 0, "mla_use_nope": True,
    } | {
        group: {key: GLM5_NEXT.defaults[name] for key, name in keys.items()} for group, keys in GLM5_NEXT.groups.items()
    },
    "vision_config": dict(GLM5_NEXT.vision_defaults) | {"out_hidden_size": 4096},
}  # fmt: skip
PRESETS = {"real": GLM5, "mid": MID, "tiny": TINY, "flash": FLASH}


def seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def values(name: str, part: Weight, shape: tuple[int, ...], config: ModelConfig) -> torch.Tensor:
    """The tensor `name`, fp32; the same for the same name and shape."""
    generator = seeded(name)
    x = torch.empty(shape).normal_(generator=generator)
    if isinstance(part, Parameter):
        return x.mul_(x[0].numel() ** -0.5)
    outliers = (torch.arange(OUTLIERS) * 977 + 7) % config.hidden_size
    if isinstance(part, Vector):
        if part.role == "norm":
            x = 1 + 0.2 * x
            if part.size == "hidden":
                x[outliers] *= 24.0
            return x
        return 1 + 0.2 * x if part.role == "layernorm" else 0.03 * x
    if part.role == "embedding":
        return x.mul_(0.5)
    spread = torch.empty(shape[0], 1).normal_(0, 0.35, generator=generator).exp_()
    x.mul_(spread * shape[1] ** -0.5)
    if part.norm and part.inp == "hidden":
        x[:, outliers] /= 24.0
    return x


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [N, K], fp32 scale per 128x128 block)."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = weight
    tiles = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = tiles.abs().amax((1, 3)).clamp_min(1e-12) / 448.0
    tiles = tiles / scale[:, None, :, None]
    return tiles.reshape(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn), scale


def stored(name: str, part: Weight, x: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    if isinstance(part, Vector) and part.role == "router_bias":
        return {name: x}
    whole = isinstance(part, Linear) and part.role == "linear" and not part.why_float  # KDA: bf16 when released
    whole = whole and not name.endswith(("lm_head.weight", "head.weight"))
    if dtype == "fp8" and whole and not name.endswith(("wk.weight", "weights_proj.weight", "mlp.gate.weight")):
        weight, scale = fp8_blocks(x)
        return {name: weight, f"{name}_scale_inv": scale}
    return {name: x.to(torch.bfloat16)}


def write_hollow(shard: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a shard with a header and a hole: it takes no space on the disk and reads as zeros."""
    wide_first = sorted(shard.items(), key=lambda item: -item[1].element_size())  # each at a multiple of its size
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in wide_first]
    path.write_bytes(shard_header(specs))
    os.truncate(path, path.stat().st_size + sum(spec.nbytes for spec in specs))


def fill(path: Path) -> None:
    """Write the small tensors of a hollow shard with which the model runs, some MB per GB.

    The router is random: every token has other experts. Other linears stay zero: the hidden state is the embedding, and
    the head chooses the next token by it, for the MTP layer, too (eh_proj). Rotations are the identity.
    """
    data = torch.from_numpy(np.memmap(path, np.uint8, "r+"))
    for entry in Shard(path).entries.values():
        tensor = data[entry.start : entry.end].view(entry.dtype).view(entry.shape)
        table = entry.name.replace("lm_head.", "head.").split(".")[-2:][0]
        if entry.name.endswith(("norm.weight", "input_scale")):
            tensor.fill_(1)
        elif entry.name.endswith("mlp.gate.weight"):
            tensor.normal_(0, 0.02, generator=seeded(entry.name))
        elif table in ("embed_tokens", "head"):
            tensor[:TOKENS].normal_(0, 0.1, generator=seeded(table))
        elif entry.name in (ROT_NAME, ROTATION) or table == "eh_proj":
            tensor.fill_diagonal_(1)


def write_quantized(source: Path, recipe: str, out: Path) -> None:
    """Write the output of `quantize` for a hollow source: files, names, shapes, types; values by `fill`."""
    checkpoint = open_source(source)
    plan = QuantizationPlan(checkpoint, load_recipe(find_recipe(recipe)))
    (out / ROTATION_FILE).parent.mkdir(parents=True)
    copy_serving_files(source, checkpoint.raw, out)
    write_json(out / DESCRIPTION_NAME, plan.description())
    shards: list[dict[str, torch.Tensor]] = [{}]
    files: dict[str, Mapping[str, torch.Tensor]] = {}
    for tensor in plan.outputs():
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if tensor.name == ROT_NAME:
            files[ROT_FILE] = {ROT_NAME: empty}
            continue
        if sum(one.nbytes for one in shards[-1].values()) >= SHARD_BYTES:
            shards.append({})
        shards[-1][tensor.name] = empty
    files |= {f"model-{number:05d}.safetensors": shard for number, shard in enumerate(shards)}
    weight_map = {name: file for file, shard in files.items() for name in shard}
    total = sum(tensor.nbytes for shard in files.values() for tensor in shard.values())
    write_json(out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    if plan.recipe.rotates:
        files[ROTATION_FILE] = {ROTATION: torch.empty([plan.config.hidden_size] * 2, device="meta")}
    for file, shard in files.items():
        write_hollow(shard, out / file)
        fill(out / file)
    named = sorted(path.name for path in out.iterdir() if path.suffix == ".json")
    content = {"recipe": {"name": recipe}, "seed": 0, "notes": ["hollow: zeros"]}
    write_provenance(out, content, [*named, *files], file_facts(out, named))
    print(f"{out}: {total} bytes, {len(weight_map)} tensors, as recipe {recipe} makes them")


def write_tokenizer(out: Path) -> None:
    """Byte level, no merges: every text has as many tokens as bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<eos>"]
    names = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="mid")
    parser.add_argument("--family", help="glm-5, ..., glm-5.3-flash: all its layers; with --hollow or --recipe")
    parser.add_argument("--experts", type=int, help="another number of routed experts")
    parser.add_argument("--mtp", type=int, help="another num_nextn_predict_layers")
    parser.add_argument("--vocab", type=int, help="another vocab_size")
    parser.add_argument("--layers", type=int, help="another num_hidden_layers")
    parser.add_argument("--dense", type=int, help="another first_k_dense_replace")
    parser.add_argument("--recipe", help="hollow, and as this recipe would quantize it: for serve and rehearse")
    parser.add_argument("--hollow", action="store_true", help="headers only, data as holes: for --dry-run at any size")
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16")
    args = parser.parse_args()
    if args.recipe:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source"
            write_model(argparse.Namespace(**vars(args) | {"out": source, "hollow": True}))
            write_quantized(source, args.recipe, args.out)
    else:
        write_model(args)


def keys_of(family: str) -> dict[str, Any]:
    """config.json of a model of the family, as the planner knows it."""
    model = planner_family().models[family]
    text = model.get("text_config")
    if text is None:
        return GLM5 | model
    return FLASH | {"text_config": FLASH["text_config"] | text | {"num_hidden_layers": len(text["layer_types"])}}


def config_keys(args: argparse.Namespace) -> dict[str, Any]:
    """config.json with the changes that the options ask for."""
    changes = {
        "n_routed_experts": args.experts, "num_nextn_predict_layers": args.mtp, "vocab_size": args.vocab,
        "num_hidden_layers": args.layers, "first_k_dense_replace": args.dense,
    }  # fmt: skip
    raw = keys_of(args.family) if args.family else PRESETS[args.preset]
    text = raw.get("text_config", raw) | {key: value for key, value in changes.items() if value is not None}
    if "text_config" not in raw:
        return text | ({"indexer_types": list(parse_config(text, args.out).indexer_types)} if args.family else {})
    layers, dense = text["num_hidden_layers"], text["first_k_dense_replace"]
    # Every fourth layer has sparse attention; of fewer than four the last one.
    sparse = [layer % 4 == 3 or layer + 1 == layers < 4 for layer in range(layers)]
    text["layer_types"] = [("linear_attention", "deepseek_sparse_attention")[is_sparse] for is_sparse in sparse]
    text["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    return raw | {"text_config": text}


def write_model(args: argparse.Namespace) -> None:
    raw = config_keys(args)
    args.out.mkdir(parents=True)
    if args.dtype == "fp8":
        raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (args.out / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    write_tokenizer(args.out)
    if "vision_config" in raw:
        (args.out / "processor_config.json").write_text('{"processor_class": "Glm5NextProcessor"}\n')
    config = load_config(args.out)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    count = total = 0

    def flush() -> None:
        nonlocal shard, count, total
        count, total = count + 1, total + sum(tensor.nbytes for tensor in shard.values())
        file = f"model-{count:05d}.safetensors"
        write_hollow(shard, args.out / file) if args.hollow else save_file(shard, args.out / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard = {}

    for prefix, part in config.all_weights():
        if part.name in config.spec.mtp_copies:
            continue  # the hub's checkpoints leave them out; the model's own embedding and head serve
        name, shape = prefix + part.tensor_name, part.shape(config.sizes)
        x = torch.empty(shape, device="meta") if args.hollow else values(name, part, shape, config)
        shard |= stored(name, part, x, args.dtype)
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            flush()
    flush()
    write_json(args.out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    print(f"{args.out}: {total} bytes in {count} shards")


if __name__ == "__main__":
    main()
