"""The product that bound layers repeat is the one that vLLM's own linear layer makes, on whatever this processor is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm import _custom_ops
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from glm5_ascend.serve.plugin.linear import packed_product

#: (rows, columns) of a router, of GLM-5's small heads, and of one that AMX takes no tile of.
SHAPES = (16, 192), (144, 192), (64, 64), (40, 72)


@pytest.mark.skipif(not _custom_ops._supports_onednn, reason="this vLLM has no library's product")
@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 8])
def test_it_gives_what_vllms_layer_gives(shape: tuple[int, int], tokens: int, removed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).bfloat16()
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    layer.quant_method = UnquantizedLinearMethod()
    dispatch_cpu_unquantized_gemm(layer, remove_weight=removed)
    x, out = torch.randn(tokens, shape[1], generator=generator).bfloat16(), torch.zeros(tokens, shape[0]).bfloat16()
    product = packed_product(layer)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # AVX2 alone: neither has vLLM one
        assert product is None
        return
    assert product is not None, "vLLM lays weights out in a way that is not known: layers fall back to its slower call"
    product(x, out)
    assert torch.equal(out, layer.cpu_linear(x, layer.weight, None))
    exact = x.double() @ weight.double().T
    assert (out.double() - exact).abs().max() < 0.02 * exact.abs().max()


def test_no_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("could not create a primitive descriptor for the matmul primitive")

    monkeypatch.setattr(_custom_ops, "create_onednn_mm", refuse)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(32, 64).bfloat16(), requires_grad=False)
    layer.quant_method = UnquantizedLinearMethod()
    assert packed_product(layer) is None


def test_a_layer_without_a_weight_laid_out_has_none() -> None:
    layer = SimpleNamespace(weight=torch.nn.Parameter(torch.randn(4, 4)), quant_method=None)
    assert packed_product(layer) is None
