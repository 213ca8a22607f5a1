"""Steps of a server on the built models, called as NPUModelRunner does: a prompt, a decode step, a draft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.config import VllmConfig

from . import caches, walk
from .meta import BigOnMeta

#: Pages of the caches; no result depends on the number.
PAGES = 64
#: Largest number of computed tokens of a request in a decode step.
COMPUTED = 4096


@dataclass(frozen=True)
class Step:
    """A step of equal requests. before, new: computed and new tokens of each. model: `target` or `draft`."""

    name: str
    model: str
    requests: int
    before: int
    new: int
    state: str

    @property
    def tokens(self) -> int:
        return self.requests * self.new


def steps_of(config: VllmConfig) -> Iterator[Step]:
    """Yield the steps of a role. A prefill role has no decode steps, a decode role no prompts."""
    scheduler, transfer = config.scheduler_config, config.kv_transfer_config
    drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
    role = transfer.kv_role if transfer is not None else "kv_both"
    before = min(COMPUTED, config.model_config.max_model_len - drafts - 2)
    requests = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens // (drafts + 1))
    prompt = min(scheduler.max_num_batched_tokens, config.model_config.max_model_len)
    state = "SpecDecoding" if drafts else "DecodeOnly"
    if role != "kv_consumer":
        yield Step("prefill", "target", 1, 0, prompt, "ChunkedPrefill")
        if drafts:
            yield Step("prefill draft", "draft", 1, 0, prompt, "ChunkedPrefill")
    if role != "kv_producer":
        yield Step("decode", "target", requests, before, drafts + 1, state)
        if drafts:
            yield Step("decode draft", "draft", requests, before, drafts + 1, state)
        if drafts > 1:
            yield Step("next draft", "draft", requests, before + 1, 1, "DecodeOnly")


def prepare(models: dict[str, Any]) -> None:
    """Give every layer meta caches, or states of linear attention, of a few pages."""
    walk.without_streams()
    for layer in (layer for model in models.values() for layer in linear_layers(model)):
        states = zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
        layer.kv_cache = tuple(torch.empty(PAGES, *shape, dtype=dtype, device="meta") for shape, dtype in states)
    for layer in (layer for model in models.values() for layer in attention_layers(model)):
        parts = widths(layer.impl)
        tensors = [torch.empty(PAGES, 128, 1, width, dtype=dtype, device="meta") for width, dtype in parts]
        caches_of_keys = indexer_caches(layer)
        latents = 2 - (tensors[0].dtype == torch.int8) if caches_of_keys else len(tensors)
        layer.kv_cache = tuple(tensors[:latents])
        for cache in caches_of_keys[:1]:
            cache.kv_cache = tuple(tensors[latents:])
        for cache in caches_of_keys[1:]:
            shape = PAGES, 2, cache.block_size, cache.head_dim
            cache.kv_cache = (torch.empty(shape, dtype=cache.dtype, device="meta"),)


def indexer_caches(layer: Any) -> list[Any]:
    """Layers with the indexer's own caches: keys, and the tokens of an unfinished pool; none in lines before 0.30."""
    impl = layer.impl
    if not getattr(impl, "runtime_has_indexer", False):
        return []
    holder = getattr(impl.indexer, "impl", impl.indexer)  # the pooled indexer's caches lie one object deeper
    return [getattr(holder, name) for name in ("k_cache", "tail_cache") if hasattr(holder, name)]


def attention_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "impl") and hasattr(module, "kv_cache")]


def linear_layers(model: Any) -> list[Any]:
    """Layers of linear attention, whose states vLLM keeps like Mamba's."""
    return [module for module in model.modules() if hasattr(module, "get_state_shape")]


def widths(impl: Any) -> Iterator[tuple[int, torch.dtype]]:
    """Yield width and type of each part of a layer's cache, in vllm-ascend's order."""
    if getattr(impl, "enable_sparse_sfa_c8", False):
        yield impl.sfa_qsfa_packed_kv_head_dim, torch.int8
    else:
        yield impl.kv_lora_rank, torch.bfloat16
        yield impl.qk_rope_head_dim, torch.bfloat16
    indexer: Any = getattr(impl, "indexer", None)
    keys: Any = indexer if hasattr(indexer, "enable_sparse_li_c8") else impl  # the indexer's attribute since 0.30
    if impl.has_indexer and getattr(keys, "enable_sparse_li_c8", False):
        yield impl.head_dim, getattr(keys, "c8_k_cache_dtype", torch.int8)
        yield 1, getattr(keys, "c8_k_scale_cache_dtype", torch.float16)
    elif impl.has_indexer:
        yield impl.head_dim, torch.bfloat16


def take(config: VllmConfig, step: Step, models: dict[str, Any]) -> walk.OperatorWalk:
    """Run one step: model and logits. The host's preparation is not recorded."""
    model, walked = models[step.model], walk.OperatorWalk()
    with torch.no_grad(), BigOnMeta(), walked, context(config, step, model):
        walked.lines.clear()
        hidden = forward(config, step, model)
        if hidden is not None:
            rows = torch.empty(step.requests, hidden.shape[-1], dtype=hidden.dtype, device="meta")
            model.compute_logits(rows)
    return walked


def forward(config: VllmConfig, step: Step, model: Any) -> Any:
    """Hidden states; None on a pipeline stage that is not the last."""
    from vllm.distributed import get_pp_group

    padded, width = padded_tokens(config, step), config.model_config.get_hidden_size()
    ids = torch.empty(padded, dtype=torch.int32, device="meta")
    positions = torch.empty(padded, dtype=torch.int64, device="meta")
    if step.model == "draft":
        hidden = torch.empty(padded, width, dtype=torch.bfloat16, device="meta")
        proposer = caches.proposer_of(config, model)
        if hasattr(proposer, "maybe_pad_and_reduce"):  # some lines split the draft's rows before the call
            hidden, positions = proposer.maybe_pad_and_reduce(hidden, positions)
        answer = model(input_ids=ids, positions=positions, hidden_states=hidden)
        return answer[0] if isinstance(answer, tuple) else answer
    stages = get_pp_group()
    intermediate = (
        None if stages.is_first_rank else model.make_empty_intermediate_tensors(padded, torch.bfloat16, "meta")
    )
    answer = model(ids, positions, intermediate, None)
    return answer if stages.is_last_rank else None


def padded_tokens(config: VllmConfig, step: Step) -> int:
    """Tokens rounded up to a multiple of the tensor parallel size, as sequence parallelism requires."""
    size: int = config.parallel_config.tensor_parallel_size
    return -(-step.tokens // size) * size


@contextmanager
def context(config: VllmConfig, step: Step, model: Any) -> Iterator[None]:
    """vllm-ascend's forward context with the metadata that its builder makes for the step."""
    from vllm_ascend.ascend_forward_context import set_ascend_forward_context

    padded, data = padded_tokens(config, step), config.parallel_config.data_parallel_size
    across = torch.full((data,), padded, dtype=torch.int32) if data > 1 else None
    draft = step.model == "draft"
    with set_ascend_forward_context(
        metadata(config, step, model), config, num_tokens=padded, num_tokens_across_dp=across,
        num_actual_tokens=step.tokens, model_instance=None if draft else model, is_draft_model=draft,
        skip_compiled=True,
    ):  # fmt: skip
        yield


def metadata(config: VllmConfig, step: Step, model: Any) -> dict[str, Any]:
    """Attention metadata by name of the layer."""
    layers = {layer.layer_name: layer for layer in attention_layers(model)}
    layers |= {cache.prefix: cache for layer in layers.values() for cache in indexer_caches(layer)}
    linear = {layer.prefix: layer for layer in linear_layers(model)}
    drafts = {
        "num_accepted_tokens": torch.ones(step.requests, dtype=torch.int32),
        "num_decode_draft_tokens_cpu": torch.full((step.requests,), step.new - 1, dtype=torch.int32),
    }
    specs = caches.cache_specs(config)
    common = common_metadata(config, step)
    built: dict[str, Any] = {}
    shared: dict[Any, Any] = {}
    for name, layer in (layers | linear).items():
        spec = specs[name]
        key = type(layer), type(spec), spec.page_size_bytes
        if key not in shared:
            builder = layer.get_attn_backend().get_builder_cls()(spec, [name], config, torch.device("cpu"))
            verified = drafts if name in linear and step.state == "SpecDecoding" else {}
            shared[key] = builder.build(0, common, **verified)
        built[name] = shared[key]
    return built


def common_metadata(config: VllmConfig, step: Step) -> Any:
    """Metadata of the step as the runner passes it to the builders."""
    from vllm_ascend.attention.attention_v1 import AscendAttentionState
    from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

    padded = padded_tokens(config, step)
    starts = torch.arange(0, step.tokens + 1, step.new, dtype=torch.int32)
    lengths = torch.full((step.requests,), step.before + step.new, dtype=torch.int32)
    block = config.cache_config.block_size
    pages = -(-(step.before + step.new) // block) * (block // 128)
    values = {
        "query_start_loc": starts, "query_start_loc_cpu": starts, "seq_lens": lengths, "seq_lens_cpu": lengths,
        "_seq_lens_cpu": lengths, "num_computed_tokens_cpu": lengths - step.new, "num_reqs": step.requests,
        "num_actual_tokens": step.tokens, "max_query_len": step.new, "max_seq_len": step.before + step.new,
        "block_table_tensor": torch.zeros(step.requests, pages, dtype=torch.int32),
        "slot_mapping": torch.zeros(padded, dtype=torch.int32), "causal": True,
        "positions": torch.zeros(padded, dtype=torch.int64), "positions_cpu": torch.zeros(padded, dtype=torch.int64),
        "attn_state": AscendAttentionState[step.state], "num_input_tokens": padded,
        "is_prefilling": torch.full((step.requests,), step.new > 1 and not step.before),
        "actual_seq_lengths_q": starts[1:].tolist(), "decode_token_per_req": step.new,
    }  # fmt: skip
    names = {field.name for field in fields(AscendCommonAttentionMetadata)}
    return AscendCommonAttentionMetadata(**{name: value for name, value in values.items() if name in names})
