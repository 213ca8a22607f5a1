"""Bytes: against sizes known from elsewhere, against the writer's own tensor list, and against a real checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tools import known_sizes
from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.types import FLOAT, W4A8_DYNAMIC, W8A8_DYNAMIC
from glm5_ascend.plan import memory, weights
from glm5_ascend.plan.hardware import load_hardware
from glm5_ascend.plan.inputs import Workload
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import from_directory, named
from tests.support.tiny_model import write_tiny_model


@pytest.mark.parametrize("size", list(known_sizes.sizes()), ids=lambda size: size.what)
def test_known_size(size: known_sizes.Size) -> None:
    assert size.computed == pytest.approx(size.published, rel=0.01)


def test_checkpoint_directory_has_its_real_types_and_bytes(tiny_w4a8: Path) -> None:
    model = from_directory(tiny_w4a8)
    entries = CheckpointDir(tiny_w4a8).entries
    assert model.stored_bytes == sum(entry.end - entry.start for entry in entries.values())
    assert model.expert_type == W4A8_DYNAMIC
    # By formula the same but for what the planner leaves out (rot) and the MTP layer's norms, which ours has in fp32.
    rot = entries["rot.weight"]
    mtp = f"model.layers.{model.config.num_hidden_layers}."
    norms = [entries[f"{mtp}{name}.weight"] for name in weights.MTP_BF16]
    extra = rot.end - rot.start + sum((e.end - e.start) // 2 for e in norms)
    assert weights.stored_bytes(model) == model.stored_bytes - extra


@pytest.mark.parametrize(("dtype", "named_so"), [("fp8", "fp8"), ("float16", "bf16")])
def test_a_source_directory_is_planned_as_it_is_stored(tmp_path: Path, dtype: str, named_so: str) -> None:
    directory = write_tiny_model(tmp_path / "source", dtype=dtype)
    model = from_directory(directory)
    entries = CheckpointDir(directory).entries.values()
    assert model.stored_bytes == sum(entry.end - entry.start for entry in entries)
    assert model.quantization == named_so and model.rules is not None and model.rules.fp8 == (dtype == "fp8")
    assert model.expert_type == (W8A8_DYNAMIC if dtype == "fp8" else FLOAT)


def test_dcp_divides_the_attention_cache_only() -> None:
    model = named("glm-5", "w4a8")
    whole, split = memory.bytes_per_token(model, True), memory.bytes_per_token(model, True, dcp=16)
    assert split == 79 * (1152 / 16 + 256)
    assert whole == 79 * 1408


def test_a_request_of_linear_attention_keeps_its_states() -> None:
    """34 states of 64 x 128 x 128 fp32: 143 MB on all dies. vllm-ascend keeps seven with five drafts, in pages."""
    model = named("glm-5.3-flash", "w4a8")
    for tp, page in ((8, 640), (16, 384)):  # tokens of a page: vllm-ascend #17074 shows 640
        engine = Engine(tp, drafts=5)
        die = memory.fit(model, load_hardware("a3"), engine)
        assert die.state_tokens == page * (1 + 3 * 7)
        states = 7 * 34 * 64 * 128 * 128 * 4 / tp
        assert states < die.state_tokens * die.bytes_per_token < 2 * states
    fewer, more = (die.most_requests(engine, Workload(1000, 100, 1), end) for end in ("low", "high"))
    assert 0 < fewer <= more
    assert memory.fit(named("glm-5", "w4a8"), load_hardware("a3"), Engine(16)).state_tokens == 0


def test_official_recipes_fit() -> None:
    """A3 W4A8 with 200k, A3 W8A8 with 40,960 and A2 W4A8 with 32,768 tokens are documented to run; A2 W8A8 is not."""
    a3, a2 = load_hardware("a3"), load_hardware("a2")
    w4a8, w8a8 = named("glm-5", "w4a8"), named("glm-5", "w8a8")
    assert memory.fit(w4a8, a3, Engine(16, 1, sequences=16)).tokens() >= 200_000
    whole, half = (Engine(tp, 1, sequences=tp) for tp in (16, 8))  # neither recipe sets DSA-CP
    assert memory.fit(w8a8, a3, whole).tokens() >= 40_960
    assert memory.fit(w4a8, a2, half).tokens() >= 32_768
    assert memory.fit(w8a8, a2, Engine(8, 1)).budgets["high"] < 0


def test_unknowns_have_a_range_around_their_value() -> None:
    for name, (low, value, high) in memory.GUESSED.items():
        assert low <= value <= high, name
    die = memory.fit(named("glm-5", "w4a8"), load_hardware("a3"), Engine(16, 1))
    assert die.budgets["low"] < die.budgets["value"] < die.budgets["high"]
    assert die.budgets["value"] + sum(die.parts.values()) == pytest.approx(die.usable)
