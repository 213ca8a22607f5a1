"""msModelSlim 26.1.0 on a CPU, for a GLM-5 of any size: `python benchmarks/tools/msmodelslim_cpu.py quant ...`.

Runs in a virtual environment that holds msmodelslim and no NPU. What the stock tool lacks for that is put in from
outside: sizes and RoPE from config.json (it has them built in), the router's bias for any hidden size, `.npu()` as
identity, and the head's input in the head's dtype. On a processor without bf16 instructions its bf16 products are
computed in fp32 and rounded: torch emulates them several times slower. Nothing of the algorithm changes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

STOCK_LAYERS = 79  # 78 and the MTP layer, written into the stock adapter


def without_npu() -> None:
    """`x.npu()` and `x.to("npu")` stay where they are."""
    torch.Tensor.npu = lambda self, *_, **__: self  # type: ignore[attr-defined]
    for kind in (torch.Tensor, torch.nn.Module):
        stock = kind.to

        def stay(self: Any, *args: Any, stock: Any = stock, **options: Any) -> Any:
            return self if args[:1] == ("npu",) else stock(self, *args, **options)

        kind.to = stay  # type: ignore[method-assign, assignment]


def sizes_from(config: dict[str, Any]) -> None:
    """Replace the stock sizes by those of `config`."""
    from msmodelslim.model.glm_5 import model, model_adapter

    layers = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    stock = model.ModelArgs

    class Sizes(stock):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            is_stock = name == "num_hidden_layers" and value == STOCK_LAYERS
            super().__setattr__(name, layers if is_stock else value)

    def make() -> Any:
        sizes = Sizes()
        for field in dataclasses.fields(stock):
            if field.name in config and field.name != "dtype":
                object.__setattr__(sizes, field.name, config[field.name])
        object.__setattr__(sizes, "rope_theta", config["rope_parameters"]["rope_theta"])
        for length in ("max_seq_len", "original_seq_len"):  # equal: no YaRN, which no GLM-5 has
            object.__setattr__(sizes, length, 16384)
        return sizes

    model_adapter.ModelArgs = make
    router = model.Gate.__init__

    def with_bias(self: Any, args: Any) -> None:
        router(self, args)
        self.e_score_correction_bias = torch.nn.Parameter(torch.empty(args.n_routed_experts, dtype=torch.float32))

    model.Gate.__init__ = with_bias
    shift = model_adapter.remove_zero_and_shift
    # It sends the MTP layer's token ids through bf16, which rounds 1022 up to 1024: beyond a small vocabulary.
    model_adapter.remove_zero_and_shift = lambda ids: shift(ids).clamp(max=config["vocab_size"] - 1)
    build = model_adapter.GLM5ModelAdapter.init_model

    def with_head(self: Any, *args: Any, **options: Any) -> Any:
        glm5 = build(self, *args, **options)
        glm5.lm_head.register_forward_pre_hook(lambda head, inputs: (inputs[0].to(head.weight.dtype),))
        return glm5

    model_adapter.GLM5ModelAdapter.init_model = with_head


def bf16_products_in_fp32() -> None:
    """Sums in fp32 and one rounding, as bf16 instructions do it."""

    def wrap(stock: Any) -> Any:
        def product(*operands: Any, **options: Any) -> Any:
            if getattr(operands[0], "dtype", None) != torch.bfloat16:
                return stock(*operands, **options)
            wide = [value.float() if isinstance(value, torch.Tensor) else value for value in operands]
            return stock(*wide, **options).to(torch.bfloat16)

        return product

    torch.matmul = wrap(torch.matmul)
    torch.nn.functional.linear = wrap(torch.nn.functional.linear)


if __name__ == "__main__":
    without_npu()
    if not {"avx512_bf16", "amx_bf16"} & set(Path("/proc/cpuinfo").read_text().split()):
        bf16_products_in_fp32()
    model_path = Path(sys.argv[sys.argv.index("--model_path") + 1])
    sizes_from(json.loads((model_path / "config.json").read_text()))
    from msmodelslim.cli.__main__ import main

    sys.argv[0] = "msmodelslim"
    main()
