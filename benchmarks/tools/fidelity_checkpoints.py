"""The checkpoints that report_fidelity.py compares, paths with the commands a user types; existing ones are reused."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from training.chats import training_chat
from training.outliers import plant
from transformers import AutoTokenizer

from glm5_ascend.demo_model.resources import data_folder
from glm5_ascend.fidelity.evaluation.python_docs import documents
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.quantize.job import open_job
from glm5_ascend.quantize.methods.gptq import GPTQ
from glm5_ascend.quantize.options import QuantizeOptions
from glm5_ascend.quantize.recipe import Recipe, find_recipe, recipe_content
from glm5_ascend.quantize.selector import symbols

PEER = Path(__file__).with_name("msmodelslim_cpu.py")
#: Recipes for msModelSlim in place of ours.
PEER_RECIPES = {"w8a8": str(Path(__file__).with_name("msmodelslim-w8a8.yaml"))}
#: Records of a drawn calibration text: as many tokens as the bundled one has, half of them chats.
TEXTS, CHATS, CHARACTERS = 32, 31, 500


def glm5_ascend(*arguments: str) -> None:
    """Run our program."""
    run_program([sys.executable, "-m", "glm5_ascend", *arguments])


def run_program(words: Sequence[object]) -> None:
    command = [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}")


def make_demo(out: Path, outliers: float = 1.0, model: str = "glm-5") -> Path:
    if not out.is_dir() and outliers > 1:
        plant(data_folder(), out, outliers)
    elif not out.is_dir():
        glm5_ascend("demo-model", str(out), model)
    return out


def plain_flash(work: Path) -> Path:
    """The recipe flash-w4a8 with plain rounding of the experts, too."""
    recipe, path = recipe_content(find_recipe("flash-w4a8")), work / "flash-rtn.yaml"
    for step in recipe["spec"]["process"]:
        for linear in step["configs"]:
            linear["qconfig"]["weight"]["method"] = "minmax"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def calibration(work: Path, seed: int) -> list[str]:
    """Arguments of `quantize`: seed 0 is the bundled text, others are drawn from the demo model's training data."""
    if seed == 0:
        return []
    path, rng = work / f"calibration-{seed}.jsonl", random.Random(seed)
    records: list[dict[str, Any]] = []
    for text in rng.sample(documents(held_out=False), TEXTS):
        start = rng.randrange(max(1, len(text) - CHARACTERS))
        records.append({"text": text[start : start + CHARACTERS]})
    for _ in range(CHATS):
        messages, tools, _ = training_chat(rng)
        records.append({"messages": messages} | ({"tools": tools} if tools else {}))
    rng.shuffle(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return ["--calib", str(path), "--seed", str(seed)]


def quantized(source: Path, out: Path, recipe: str, texts: list[str]) -> Path:
    """Quantize with glm5-ascend, and verify."""
    if not out.is_dir():
        glm5_ascend("quantize", str(source), str(out), "--recipe", recipe, "--quiet", *texts)
        glm5_ascend("verify", str(out))
    return out


def with_mtp_layer(source: Path, out: Path) -> Path:
    """Write `source` with a copy of its last layer as an MTP layer and an index, for msModelSlim."""
    if out.is_dir():
        return out
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    tensors = load_file(out / "model.safetensors")
    prefix, mtp = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    tensors |= {mtp + name.removeprefix(prefix): tensors[name].clone() for name in tensors if name.startswith(prefix)}
    gain = torch.ones(hidden, dtype=torch.bfloat16)
    tensors |= {
        f"{mtp}enorm.weight": gain,
        f"{mtp}hnorm.weight": gain.clone(),
        f"{mtp}eh_proj.weight": torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1).bfloat16(),
        f"{mtp}shared_head.norm.weight": tensors["model.norm.weight"].clone(),
        f"{mtp}shared_head.head.weight": tensors["lm_head.weight"].clone(),
        f"{mtp}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(tensors), "model.safetensors")}  # which it needs, too
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return out


def quantized_by_peer(source: Path, out: Path, recipe: str, python: Path, **texts: Any) -> Path:
    """Quantize with msModelSlim from our sequences; with its own recipe where ours of that name smooths more.

    Args:
        python: of an environment with msModelSlim. texts: options of `quantize`.
    """
    if out.is_dir():
        return out
    job = open_job(QuantizeOptions(source, out, PEER_RECIPES.get(recipe, recipe), **texts))
    assert job.calibration is not None
    with tempfile.TemporaryDirectory() as name:
        sequences, config = Path(name) / "texts.json", Path(name) / "recipe.yaml"
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        sequences.write_text(json.dumps([tokenizer.decode(ids) for ids in job.calibration.sequences]))
        config.write_text(peer_recipe(job.plan.recipe, job.source.config, sequences))
        words = [python.absolute(), PEER, "quant", "--model_path", source, "--save_path", out, "--device", "cpu"]
        run_program([*words, "--model_type", "GLM-5", "--config_path", config])
    return out


def peer_recipe(recipe: Recipe, config: ModelConfig, texts: Path) -> str:
    """A recipe as msModelSlim reads it (JSON, which YAML includes): layer numbers, SSZ and min-max for GPTQ."""
    numbers = symbols(config)
    patterns = re.sub(
        r'"([^"]*)\{(\w+)\}([^"]*)"',
        lambda found: ",".join(f'"{found[1]}{n}{found[3]}"' for n in numbers[found[2]]) or '"-"',
        recipe.model_dump_json(exclude_none=True),
    )
    content = json.loads(patterns, object_hook=_without_gptq)
    del content["metadata"]["format_version"]
    content["metadata"].setdefault("score", 90)
    return json.dumps({**content, "apiversion": "modelslim_v1", "spec": content["spec"] | {"dataset": str(texts)}})


def _without_gptq(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("method") == GPTQ.name:
        value["method"] = "ssz" if value["dtype"] == "int4" else "minmax"
    return value
