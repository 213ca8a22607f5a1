"""transformers' GLM-5 trained as its quantized self: a drop-in, equal over processes, exported to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.errors import CheckpointError, ConfigError, OutputError, RecipeError
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_ascend.quantize.training.prepare import export_trained, prepare_qat, rounded_weights
from tests.serve.support.oracle import hf_model
from tests.support.command import ROOT, TIMEOUT_S, environment
from tests.support.tiny_model import quantize_tiny, write_tiny_model

pytest.importorskip("transformers.models.glm_moe_dsa")
#: No longer than index_topk: among keys of equal score transformers' indexer and ours may choose others.
SEQUENCE = torch.randint(3, 250, (3, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qat") / "source", num_hidden_layers=2)


def test_parameters_stay_and_the_forward_is_the_quantized_one(source: Path, tmp_path: Path) -> None:
    model = hf_model(source)
    before = {name: (id(parameter), parameter.clone()) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        float_logits = model(SEQUENCE, use_cache=False).logits
    assert prepare_qat(model, "qat-w4a8") is model
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == {
        name: identity for name, (identity, _) in before.items()
    }
    assert all(torch.equal(parameter, before[name][1]) for name, parameter in model.named_parameters())
    with torch.no_grad():
        logits = model(SEQUENCE, use_cache=False).logits
    expected = torch.stack(StoredModel(quantize_tiny(source, tmp_path / "out", "qat-w4a8")).logits(list(SEQUENCE)))
    # Not to the bit: attention sums in another order, and values at the edge of a rounding step fall either way.
    assert (logits - expected).norm() < 0.2 * (float_logits - expected).norm()


def test_every_trained_parameter_gets_a_gradient(source: Path) -> None:
    model = prepare_qat(hf_model(source))
    model(SEQUENCE, labels=SEQUENCE, use_cache=False).loss.backward()
    lacking = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert lacking == []
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {
        name for name, _ in model.named_parameters() if ".indexer." in name
    }


def test_exported_and_quantized_it_holds_what_training_saw(source: Path, tmp_path: Path) -> None:
    model = prepare_qat(hf_model(source))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(4):
        loss = model(SEQUENCE, labels=SEQUENCE, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = export_trained(model, tmp_path / "trained")
    stored = CheckpointDir(quantize_tiny(trained, tmp_path / "out", "qat-w4a8"))
    rounded = dict(rounded_weights(model))
    for name, fake in rounded.items():
        scheme = schemes.W4A8_DYNAMIC if ".experts." in name else schemes.W8A8_DYNAMIC
        assert torch.equal(schemes.integer_weight(scheme, {"weight": stored.read(f"{name}.weight")}), fake.integers)
        assert torch.equal(stored.read(f"{name}.weight_scale"), fake.scale), name
    assert sum(".experts." in name for name in rounded) == 3 * 4
    before, after = open_source(source), open_source(trained)
    changed = {name for name in before.files.entries if not torch.equal(before.read(name), after.read(name))}
    assert any(".experts.1.up_proj" in name for name in changed) and "lm_head.weight" in changed
    assert not [name for name in changed if name.startswith("model.layers.2.") or ".indexer." in name]


def test_what_cannot_be_trained_is_refused(source: Path, tmp_path: Path) -> None:
    model = hf_model(source)
    for recipe in ("w4a8", "w8a8"):
        with pytest.raises(RecipeError, match="only round"):
            prepare_qat(model, recipe)
    with pytest.raises(ConfigError, match="no checkpoint"):
        prepare_qat(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="has no linear"):
        prepare_qat(torch.nn.Linear(2, 2), source=source)
    with pytest.raises(CheckpointError, match="has no tensor"):
        export_trained(torch.nn.Linear(2, 2), tmp_path / "out", source)
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OutputError, match="not empty"):
        export_trained(model, tmp_path / "full")


@pytest.mark.long
def test_the_example_learns_the_same_in_one_process_and_in_two(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    generator = torch.Generator().manual_seed(1)
    lines = torch.randint(97, 122, (4, 32), generator=generator).tolist()
    text.write_text("\n".join("".join(map(chr, line)) for line in lines) + "\n")
    trained = {}
    for ranks in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks == 2 else []
        command = [sys.executable, *launcher, "quant_recipes/train_qat.py", source, text, tmp_path / str(ranks)]
        done = subprocess.run(
            [*map(str, command)],
            cwd=ROOT, env=environment(STEPS="3"), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        trained[ranks] = open_source(tmp_path / str(ranks))
    before = open_source(source)
    moved = [name for name in before.files.entries if not torch.equal(before.read(name), trained[1].read(name))]
    assert len(moved) > 20
    # One gradient, averaged in another order: fp32's last bits, and values that these push over a rounding step.
    for name in moved:
        step = (trained[1].read(name) - before.read(name)).norm()
        apart = (trained[1].read(name) - trained[2].read(name)).norm()
        assert apart <= 0.02 * step + 1e-6, name
