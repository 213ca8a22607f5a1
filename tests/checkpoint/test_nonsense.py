"""Text and impossible values among weights, and what looks like them and is sound."""

from __future__ import annotations

import pytest
import torch

from glm5_ascend.checkpoint.nonsense import nonsense_in, text_in

PAGE = (
    b'<!DOCTYPE html>\n<html class="">\n<head>\n<meta charset="utf-8" />\n<title>429 Too Many Requests</title>\n'
    b'<link rel="stylesheet" href="/front/build/style.css" />\n</head><body>We had to rate limit you.</body></html>'
) * 3
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca\n"
ANSWER = b'{"error": {"code": 403, "message": "Access to model zai-org/GLM-5.3 is restricted, log in"}, "status": 403}'
TABLE = b"0.0123,4.5678,9.1011,1.2131,4.1516,1.7181,9.2021\n2.2232,4.2526,2.7282,9.3031,3.2333,4.3536,3.7383\n"


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def with_bytes(tensor: torch.Tensor, data: bytes, at: int) -> torch.Tensor:
    stored = tensor.clone()
    stored.view(-1).view(torch.uint8)[at : at + len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return stored


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("text", [PAGE[:600], PAGE[:128], LFS, ANSWER, TABLE], ids=["600", "128", "lfs", "json", "csv"])
def test_text_is_found_at_every_place(text: bytes, dtype: torch.dtype) -> None:
    tensor = (weights(64, 96) * (1000 if dtype is torch.int8 else 1)).to(dtype)
    assert text_in(tensor) is None
    for at in (0, 1, 777, 2000 + 33, tensor.nbytes - len(text)):
        found = text_in(with_bytes(tensor, text, at))
        assert found is not None and found.startswith("holds text, not values"), at


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_page_in_a_large_tensor(dtype: torch.dtype) -> None:
    tensor = (weights(1024, 1100) * (1000 if dtype is torch.int8 else 1)).to(dtype)
    assert text_in(tensor) is None
    for at in (0, 1, 333_333, tensor.nbytes - 520):
        assert text_in(with_bytes(tensor, PAGE[:520], at)) is not None


@pytest.mark.parametrize("value", [1e33, -1e33, 1e10, 3e38])
def test_one_impossible_value(value: float) -> None:
    for tensor in (weights(64, 96), 1 + 10 * weights(512)):
        tensor.view(-1)[77] = value
        fault = nonsense_in(tensor.bfloat16(), tensor)
        assert fault is not None and "its largest value is" in fault
        assert f"{abs(value):.1g}"[:1] in fault


def test_nothing_but_impossible_values() -> None:
    tensor = torch.full((64, 96), 1e30)
    assert nonsense_in(tensor.bfloat16(), tensor) is not None


def test_odd_but_sound() -> None:
    outlier = weights(64, 96)
    outlier[:, 5] *= 1000
    heavy = weights(64, 96)
    heavy[3, 3] = 1e6
    never_chosen = 0.1 * weights(64)
    never_chosen[2] = -1e4
    zero = torch.zeros(64, 96)
    nearly_dead = weights(64, 96) * 1e-30
    nearly_dead[5] = 0.02
    for sound in (outlier, heavy, never_chosen, zero, nearly_dead, torch.empty(0, 96)):
        for dtype in (torch.bfloat16, torch.float32):
            assert nonsense_in(sound.to(dtype), sound) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gains_have_printable_bytes(dtype: torch.dtype) -> None:
    """Gains of 0.63 to 0.99 in bf16 are a letter and "?" each; so are those of other ranges."""
    for seed in range(20):
        chance = torch.Generator().manual_seed(seed)
        narrow = 0.63 + 0.36 * torch.rand(6144, generator=chance)
        wide = torch.exp(2 * torch.rand(6144, generator=chance) - 1)
        for gains in (narrow, wide):
            assert nonsense_in(gains.to(dtype), gains.to(dtype).float()) is None
    ticks = torch.tensor(list(b"!?" * 64), dtype=torch.uint8)
    assert text_in(ticks) is None
