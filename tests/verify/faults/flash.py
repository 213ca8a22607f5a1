"""Faults in what only GLM-5.3-Flash has: nested config.json, linear attention, residual streams, vision, processor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.verify.faults.keys import CONFIG, C, K
from tests.verify.faults.row import DESCRIPTION, VALUES, Edit, Linked, Row, content, key, removed, tensor, without

T, V, P = "tensor of Flash", "value of Flash", "processor"
LAYERS = "model.language_model.layers."
Q_PROJ, A_LOG, DT_BIAS = (f"{LAYERS}0.self_attn.{name}" for name in ("q_proj", "A_log", "dt_bias"))
CONV, STREAMS = f"{LAYERS}2.self_attn.k_conv1d.weight", f"{LAYERS}1.hc_ffn_fn"
POOL = f"{LAYERS}1.self_attn.indexer.index_kpool_compress_ape"
TOWER, MERGER = "model.visual.blocks.1.mlp.up_proj.weight", "model.visual.merger.down_proj.weight"
PROCESSOR, ALIAS = "processor_config.json", "model.layers.0.mlp.up_proj.weight"


def nested(part: str, name: str, value: Any = None) -> Edit:
    """Set a key of `text_config` or `vision_config`; None removes it."""

    def edit(ck: Linked) -> None:
        with ck.json(CONFIG) as config:
            config[part].pop(name, None)
            if value is not None:
                config[part][name] = value

    return edit


def int8_kda(ck: Linked) -> None:
    weight = ck.read(f"{Q_PROJ}.weight").float()
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16().float()
    q = (weight / scale).round().clamp(-127, 127).to(torch.int8)
    ck.retype(Q_PROJ, "W8A8_DYNAMIC", {"weight": q, "weight_scale": scale, "weight_offset": scale * 0})


def two_spellings(ck: Linked) -> None:
    ck.store({f"{LAYERS}0.self_attn.forget_gate.A_log": ck.read(A_LOG)})


def not_finite_in_another_spelling(ck: Linked) -> None:
    ck.store({A_LOG: None, f"{LAYERS}0.self_attn.forget_gate.A_log": not_finite(ck.read(A_LOG))})


def gone(name: str) -> Edit:
    return lambda ck: ck.store({name: None})


def nudged(name: str) -> Edit:
    """One value of a tensor, by less than any limit of a rounded weight."""

    def edit(x: torch.Tensor) -> torch.Tensor:
        x.view(-1)[0] += 0.02
        return x

    return tensor(name, edit)


def not_finite(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[1] = float("nan")
    return x


ROWS = [
    replace(row, recipe="flash-w4a8", model="flash")
    for row in (
        Row(C, "no index_kpool", nested("text_config", "index_kpool"), "text_config lacks index_kpool"),
        Row(C, "no swiglu_limit", nested("text_config", "swiglu_limit"), "text_config lacks swiglu_limit"),
        Row(C, "no topk_method", nested("text_config", "topk_method"), "text_config lacks topk_method"),
        Row(C, "no swiglu_limit of the tower", nested("vision_config", "swiglu_limit"), "vision_config lacks swiglu"),
        Row(C, "image_token_id", key(CONFIG, "image_token_id", 100_000), "the vocabulary has"),
        Row(C, "eos_token_id", nested("text_config", "eos_token_id", [100_000]), "the vocabulary has"),
        Row(C, "dtype", nested("text_config", "dtype", "float16"), "dtype is float16, but"),
        Row(C, "FP8", nested("text_config", "quantization_config", {"quant_method": "fp8"}), "never open"),
        Row(C, "text model alone", key(CONFIG, "architectures", ["Glm5NextForCausalLM"]), "another model"),
        Row(
            C, "another swiglu_limit", nested("text_config", "swiglu_limit", 7),
            r"differs from the source's in swiglu_limit|were written|not the bytes", modes="hs",
        ),
        Row(K, "KDA in INT8", int8_kda, "KDA\\) in bf16 only"),
        Row(K, "another type for SGLang", key(DESCRIPTION, ALIAS, "FLOAT"), "SGLang reads this key"),
        Row(K, "a linear that is nowhere", key(DESCRIPTION, "model.layers.9.mlp.up_proj.weight", "FLOAT"), "no shard"),
        Row(K, "no key of A_log", without(DESCRIPTION, A_LOG), "no key for this tensor"),
        Row(T, "A_log missing", gone(A_LOG), "A_log: not found"),
        Row(T, "two spellings", two_spellings, "A_log: also in"),
        Row(T, "pool of 2", tensor(POOL, lambda x: x[:2]), r"shape \[2, 16\], expected \[4, 16\]"),
        Row(V, "streams", tensor(STREAMS, not_finite), "holds NaN", modes=VALUES),
        Row(V, "another spelling", not_finite_in_another_spelling, "A_log: holds NaN", modes=VALUES),
        Row(V, "tower", tensor(MERGER, not_finite), "holds NaN", modes=VALUES),
        *(
            Row(V, f"{name} nudged", nudged(name), "carried over|not the bytes|were written", modes="hs")
            for name in (DT_BIAS, CONV, POOL, STREAMS, TOWER)
        ),
        Row(P, "missing", removed(PROCESSOR), "can read images", "warning"),
        Row(P, "missing, the source has one", removed(PROCESSOR), "not found; the source has one", modes="s"),
        Row(P, "no JSON", content(PROCESSOR, "{"), "not valid JSON"),
        Row(P, "another", key(PROCESSOR, "processor_class", "X"), "in processor_class|were written", modes="hs"),
    )
]  # fmt: skip
