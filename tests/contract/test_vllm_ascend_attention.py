"""vllm-ascend's own attention code, of both lines, run on our kernels, against attention written out in fp32.

`AscendSFAImpl.forward` of the release runs unmodified on the real torch_npu's dispatcher, with our Lightning Indexer
and Sparse Flash Attention behind the official schemas (`vllm_ascend_on_cpu/npu_kernels.py`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment
from tests.contract.support.plain_attention import Attention
from tests.contract.support.tiny_glm5 import SIZES
from tests.ops.support.npu_operators import SCHEMAS
from tests.support.command import ROOT
from tests.support.tiny_model import quantize_tiny, write_tiny_model

pytestmark = pytest.mark.contract
STEPS = "prefill", "decode", "long prefill", "mixed"
SPARSE = 2048  # sparse_count, fixed in vllm-ascend
#: int8 activations of two layers in a row, and bf16 between them.
ERROR = 0.02
#: A recipe with FLOAT linears in front of attention's heads.
FLOAT_QUERIES = "w8a8-best"


@pytest.fixture(scope="module", params=["w4a8", FLOAT_QUERIES])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attention")
    return quantize_tiny(write_tiny_model(folder / "source", **SIZES), folder / request.param, request.param)


@pytest.fixture(scope="module")
def ran(line: RehearsalEnvironment, checkpoint: Path) -> Path:
    schemas, out = checkpoint.parent / "schemas.json", checkpoint.parent / f"ran-{line.version}.safetensors"
    schemas.write_text(json.dumps(SCHEMAS["_C_ascend"]))
    line.run("vllm_ascend_on_cpu.attention", checkpoint, ROOT / "kernels", schemas, out)
    return out


@dataclass
class Asked:
    """What one request asked in one step, and what came out.

    Attributes:
        states: hidden states of the request from its start, [L, D].
        positions: of the new tokens, [n].
        topk: bool [n, L], true at the positions that the indexer selects.
        output: [n, D].
    """

    step: str
    states: torch.Tensor
    positions: torch.Tensor
    topk: torch.Tensor
    output: torch.Tensor

    @property
    def causal(self) -> torch.Tensor:
        return torch.arange(len(self.states)) <= self.positions[:, None]


def asked(ran: Path, steps: Sequence[str] = STEPS) -> Iterator[Asked]:
    """Every request of every step, in order."""
    tensors, history = load_file(ran), {}
    for step in steps:
        values = {key: tensors[f"{step}.{key}"] for key in ("states", "positions", "owners", "chosen", "output")}
        for owner in values["owners"].unique().tolist():
            states, positions, topk, output = (
                values[key][values["owners"] == owner] for key in ("states", "positions", "chosen", "output")
            )
            history[owner] = states = torch.cat([history.get(owner, states[:0]), states])
            mask = torch.zeros(len(positions), len(states) + 1, dtype=torch.bool)
            mask.scatter_(1, topk.long() % (len(states) + 1), True)  # -1 goes to the last column
            yield Asked(step, states, positions, mask[:, :-1], output)


def test_what_is_chosen_is_visible_and_complete(ran: Path) -> None:
    for item in asked(ran):
        assert not (item.topk & ~item.causal).any()
        assert torch.equal(item.topk.sum(1), (item.positions + 1).clamp_max(SPARSE))


def test_its_attention_on_our_kernels_is_attention(ran: Path, checkpoint: Path) -> None:
    """Prefill, decode, and a mixed batch; up to 2048 positions dense, beyond them exactly the chosen ones."""
    attention = Attention(checkpoint)
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for item in asked(ran):
        beyond = item.positions >= SPARSE
        for kind, allowed in (("dense", item.causal), ("sparse", item.topk)):
            want = attention.forward(item.states, item.positions, allowed)
            for part, rows in (("up to", ~beyond), ("beyond", beyond)):
                sums[item.step, f"{kind}, {part} {SPARSE}"][0] += float((item.output - want)[rows].square().sum())
                sums[item.step, f"{kind}, {part} {SPARSE}"][1] += float(want[rows].square().sum())
    error = {key: (a / b) ** 0.5 for key, (a, b) in sums.items() if b}
    print(*(f"{step}: {kind}: relative error {value:.4f}" for (step, kind), value in error.items()), sep="\n")
    for step in STEPS:
        assert error[step, f"dense, up to {SPARSE}"] < ERROR
    for step in ("long prefill", "mixed"):
        assert error[step, f"sparse, beyond {SPARSE}"] < ERROR
        assert error[step, f"dense, beyond {SPARSE}"] > 2 * ERROR  # the choice matters


def test_our_kernels_were_the_ones_that_ran(ran: Path, checkpoint: Path, line: RehearsalEnvironment) -> None:
    with safe_open(ran, "pt") as file:
        calls = json.loads(file.metadata()["calls"])
    assert calls["npu_lightning_indexer"] == calls["npu_sparse_flash_attention"] == 4
    if line.line.copies.prolog and checkpoint.name != FLOAT_QUERIES:
        assert calls["npu_mla_prolog_v3"] == 4 and "npu_kv_rmsnorm_rope_cache" not in calls
    else:
        assert calls["npu_kv_rmsnorm_rope_cache"] == calls["npu_interleave_rope"] == 4


def missed(ran: Path, checkpoint: Path, neighbours: bool = True) -> float:
    """Share of the right choice that the indexer does not make beyond 2048 positions, by neighbours or by halves."""
    attention = Attention(checkpoint)
    (item,) = (item for item in asked(ran) if item.step == "long prefill")
    beyond = item.positions >= SPARSE
    scores = attention.index_scores(item.states, item.positions[beyond], neighbours)
    best = scores.masked_fill(~item.causal[beyond], -torch.inf).topk(SPARSE, dim=-1).indices
    return 1 - float(item.topk[beyond].gather(1, best).float().mean())


def test_without_triton_its_indexer_rotates_the_wrong_pairs(ran: Path, checkpoint: Path) -> None:
    """Upstream bug of both lines: GLM-5's indexer rotates neighbours; without Triton-Ascend it gets halves."""
    assert missed(ran, checkpoint, neighbours=False) < 0.02 < missed(ran, checkpoint)
