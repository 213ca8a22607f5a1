"""What vLLM does without a model, in a fork that has imported it: `probes.main FUNCTION ARGUMENT...` prints JSON."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CHOICES: dict[str, Any] = {
    "required": "required",
    "named": {"type": "function", "function": {"name": "get_weather"}},
    "auto": "auto",
}
OFF = {"enable_thinking": False}


def threads_of_worker(bound: str, count: str) -> list[int]:
    """CPUs and threads of a worker on a machine with one physical core, of a process with two threads."""
    import torch

    from glm5_ascend.serve.plugin import platform

    allowed = sorted(os.sched_getaffinity(0))
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": bound, "OMP_NUM_THREADS": count}
    if not count:
        del os.environ["OMP_NUM_THREADS"]
    platform.physical_cores = lambda: allowed[:1]
    torch.set_num_threads(2)
    platform.use_physical_cores()
    seen = [len(os.sched_getaffinity(0)), torch.get_num_threads()]
    os.sched_setaffinity(0, allowed)
    return seen


def plugin(model: str) -> dict[str, Any]:
    """What our entry points register, which settings they refuse, and the executor of the worker."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform

    import glm5_ascend.serve.plugin as plugin

    def config(**engine: Any) -> Any:
        return EngineArgs(model=model, max_model_len=512, **engine).create_engine_config()

    def refused(**engine: Any) -> str:
        try:
            config(**engine)
        except Exception as error:
            return str(error)
        return ""

    def executor(bound: str, **engine: Any) -> Any:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bound
        return config(**engine).parallel_config.distributed_executor_backend

    for _ in range(3):
        plugin.register()
    models = ("GlmMoeDsaForCausalLM", "DeepseekV32MTPModel")
    return {
        "platform": plugin.register_platform(),
        "resolved": f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
        "is_cpu": current_platform.is_cpu(),
        "registered": [
            op_registry_oot["MultiHeadLatentAttentionWrapper"].__module__,
            get_quantization_config("ascend").__module__,
            *(ModelRegistry.models[name].module_name for name in models),
        ],
        "executors": {
            "not_bound": executor("nobind"),
            "by_us": executor(""),
            "bound": executor("auto"),
            "asked": executor("nobind", distributed_executor_backend="mp"),
        },
        "threads": [threads_of_worker(*case) for case in (("", ""), ("", "2"), ("nobind", ""))],
        "three_ranks": refused(tensor_parallel_size=3),
        "expert_parallel": refused(tensor_parallel_size=2, enable_expert_parallel=True),
        "fp8_cache": refused(kv_cache_dtype="fp8"),
        "no_description": refused(quantization="ascend"),
        "no_boolean": refused(additional_config={"enable_sparse_li_c8": "yes"}),
    }


def positions() -> list[bool]:
    """Requests no longer than index_topk: the positions and cached keys are those that the op chooses and leaves."""
    import torch

    from glm5_ascend.serve.plugin.backend import SparseMLAMetadata
    from glm5_ascend.serve.plugin.indexer import choose_positions

    wq, wk, norm = torch.randn(32, 4 * 64), torch.randn(48, 64 + 4), torch.nn.LayerNorm(64)
    hidden, q_c, table = torch.randn(14, 48), torch.randn(14, 32), torch.randn(16, 32)
    starts, lengths = (torch.tensor(values, dtype=torch.int32) for values in ([0, 2, 14], [5, 12]))
    where = torch.tensor([3, 4, *range(12)]), torch.tensor([3, 4, *range(16, 28)])
    equal = []
    for cache in (torch.zeros(4, 8, 64), torch.zeros(4, 8, 66, dtype=torch.int8)):
        for topk in (12, 20):
            results = []
            for longest in (12, 10**9):
                rows = cache.clone()
                indexer: Any = SimpleNamespace(
                    head_dim=64, n_head=4, topk_tokens=topk, k_norm=norm, k_cache=SimpleNamespace(kv_cache=rows),
                    wq_b=lambda x: (x @ wq,), wk_weights_proj=lambda x: (x @ wk,),
                )  # fmt: skip
                metadata = SparseMLAMetadata(14, starts, lengths, torch.tensor([[0, 1], [2, 3]]).int(), where[1])
                assert metadata.longest == 12
                metadata.longest = longest
                rotary = SimpleNamespace(cos_sin_cache=table, is_neox_style=False)
                results.append((choose_positions(indexer, hidden, q_c, where[0], rotary, metadata), rows))
            equal.append(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
    return equal


def sampling(whose: str) -> dict[str, Any]:
    """vLLM's sampler constants per draft token, by its own CPU kernel (`stock`) or with ours (`plugin`)."""
    import torch
    from vllm.platforms import current_platform
    from vllm.platforms.cpu import CpuPlatform

    current_platform.import_kernels()
    (CpuPlatform if whose == "stock" else current_platform).register_triton_kernel_overrides()
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens  # after the kernels

    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    poison = [torch.full((5,), 7.0e20) for _ in range(64)]  # what a new tensor may find in memory
    del poison
    temperature = expand_batch_to_tokens(torch.tensor([0.5, 0.7, 0.0]), ends, 5, replace_from=0, replace_to=1)
    top_k = expand_batch_to_tokens(torch.tensor([3, 4, 5], dtype=torch.int32), ends, 5)
    return {"temperature": temperature.tolist(), "top_k": top_k.tolist()}


def tool_stream(folder: str, whose: str) -> dict[str, Any]:
    """A forced tool call through vLLM's parser classes, streamed and whole.

    No model: the text is one that the request's grammar allows, cut into its special tokens ("special") or into letters
    ("letters"), fed in deltas of 1 and of all tokens as the server feeds them.
    """
    from tokenizers.decoders import DecodeStream
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    if whose == "plugin":
        from glm5_ascend.serve.plugin import tools

        tools.register()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def start(choice: str) -> tuple[Any, Any]:
        """A parser and its request, as the chat endpoint makes them."""
        kind = ParserManager.get_parser(
            tool_parser_name="glm47", reasoning_parser_name="glm45", enable_auto_tools=True, tokenizer=tokenizer
        )
        request = ChatCompletionRequest(
            model="glm-5", messages=[{"role": "user", "content": "?"}], tools=[TOOL], tool_choice=CHOICES[choice],
            stream=True, chat_template_kwargs=OFF,
        )  # fmt: skip
        parser = kind(tokenizer, request.tools, chat_template_kwargs=OFF)
        return parser, parser.adjust_request(request)

    def streamed(choice: str, tokens: list[int], size: int) -> dict[str, Any]:
        parser, request = start(choice)
        prompt = ids("<|user|>?<|assistant|></think>")
        decoder = DecodeStream(skip_special_tokens=request.skip_special_tokens)
        content, calls = "", [["", ""]]
        for first in range(0, len(tokens), size):
            few = tokens[first : first + size]
            text = "".join(decoder.step(tokenizer._tokenizer, token) or "" for token in few)
            last = first + size >= len(tokens)
            delta = parser.parse_delta(text, few, request, prompt_token_ids=prompt, finished=last)
            content += (delta and delta.content) or ""
            for call in (delta and delta.tool_calls) or []:
                while call.index >= len(calls):
                    calls.append(["", ""])
                calls[call.index][0] += call.function.name or ""
                calls[call.index][1] += call.function.arguments or ""
        return {"content": content, "calls": [call for call in calls if call[0]]}

    cut = {"special": ids(CALL), "letters": [token for letter in CALL for token in ids(letter)]}
    report: dict[str, Any] = {}
    for choice in CHOICES:
        parser, request = start(choice)
        _, content, calls = parser.parse(CALL, request, enable_auto_tools=True)
        report[f"{choice} whole"] = {
            "content": content or "",
            "calls": [[call.name, call.arguments] for call in calls or []],
        }
        for name, tokens in cut.items():
            report[f"{choice} {name} by one"] = streamed(choice, tokens, 1)
            report[f"{choice} {name} at once"] = streamed(choice, tokens, len(tokens))
    return report


def main() -> None:
    function, *arguments = sys.argv[1:]
    print(json.dumps(globals()[function](*arguments)))
