"""vllm-ascend 0.30's real loader takes our GLM-5.3-Flash, and its parameters hold what our files mean.

Covered: target and MTP draft on one rank, vision tower included, from its own code and the stand-ins for an NPU. Not
covered: the NPU's kernels, several ranks, graph mode, any forward.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from glm5_ascend.deploy.profiles.command import command
from glm5_ascend.deploy.profiles.load import load as load_profile
from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment
from glm5_ascend.serve.options import ServeOptions
from tests.contract.support.loaded import Checkpoint, Load, Loaded, check_schemes
from tests.support.tiny_flash import rename_as_msmodelslim, write_tiny_flash

pytestmark = pytest.mark.contract
PROFILES = {"a2-single-flash": 8, "a3-single-flash": 16}
CASES = ("flash-w4a8", "flash-w8a8", "msModelSlim's names")


@pytest.fixture(scope="module")
def checkpoints(
    tiny_quantized: Callable[..., Path], tiny_flash: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    quantized = {recipe: tiny_quantized(recipe, tiny_flash) for recipe in CASES[:2]}
    renamed = tmp_path_factory.mktemp("renamed") / "out"
    return quantized | {CASES[2]: rename_as_msmodelslim(quantized["flash-w8a8"], renamed)}


@pytest.fixture(scope="module")
def line(vllm_ascend_030: RehearsalEnvironment) -> RehearsalEnvironment:
    """The only line that knows GLM-5.3-Flash; `load` uses it."""
    return vllm_ascend_030


def norm_biases(loaded: dict[str, Loaded], stored: Checkpoint) -> set[str]:
    """Zero biases of RMSNorms, which no file holds: vllm-ascend makes them where the description lists one bias."""
    names = set()
    for model, item in loaded.items():
        for name in item.tensors:
            module, _, suffix = name.rpartition(".")
            in_file = suffix in stored.suffixes[stored.stored_name(module, model)]
            if suffix == "bias" and module.endswith(("norm", "norm1", "norm2")) and not in_file:
                assert not item.tensors[name].any()
                names.add(name)
    return names


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_holds_what_the_file_means(case: str, checkpoints: dict[str, Path], load: Load) -> None:
    loaded = load(checkpoints[case])
    stored = Checkpoint(checkpoints["flash-w8a8" if case == CASES[2] else case])
    result = stored.compare(loaded)
    print(f"{case}: {len(result.equal)} tensors equal, {len(result.used)} of {len(stored.files.entries)} used")
    assert result.different == norm_biases(loaded, stored)
    assert result.used == stored.files.entries.keys()  # nothing in the file is left over
    assert [item.report["model"] for item in loaded.values()] == ["Glm5NextForConditionalGeneration", "Glm5NextMTP"]


@pytest.mark.parametrize("case", CASES[:2])
def test_every_module_gets_the_scheme_of_its_type(case: str, checkpoints: dict[str, Path], load: Load) -> None:
    check_schemes(load(checkpoints[case]), Checkpoint(checkpoints[case]))


def test_the_profiles_are_accepted(
    vllm_ascend_030: RehearsalEnvironment, tiny_quantized: Callable[..., Path], tmp_path: Path
) -> None:
    """By the real parser and configuration code of the line that the profiles are for."""
    source = write_tiny_flash(
        tmp_path / "source", num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=1 << 20,
        n_routed_experts=16, linear_attn_config=None, linear_num_heads=16, linear_head_dim=128,
        linear_conv_kernel_dim=4, linear_lower_bound=-5.0,
    )  # fmt: skip
    model = tiny_quantized("flash-w4a8", source)
    commands = {}
    for name in PROFILES:
        profile = load_profile(name)
        built = command(profile, profile.role(None), ServeOptions("DIR"), str(model), [])
        commands[name] = {"env": built.env, "argv": built.argv}
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    vllm_ascend_030.run("vllm_ascend_on_cpu.profiles", tmp_path / "commands.json", tmp_path / "out.json")
    answers = json.loads((tmp_path / "out.json").read_text())["commands"]
    for name, dies in PROFILES.items():
        assert "error" not in answers[name], answers[name]["error"]
        became = answers[name]["became"]
        assert became["quantization"] == "ascend" and became["tensor_parallel"] == dies and became["expert_parallel"]
        assert became["draft_tokens"] == 5 and became["graph"] == "FULL_DECODE_ONLY"
