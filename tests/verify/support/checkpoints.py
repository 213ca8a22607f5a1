"""The correct checkpoints to damage: every kind of recipe, one shard and several, GLM-5.2, msModelSlim's names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from glm5_ascend.checkpoint.checks.report import Report
from tests.support.command import ROOT
from tests.support.tiny_flash import write_tiny_flash
from tests.support.tiny_model import SHARED_INDEXER, write_tiny_model
from tests.verify.support.editor import INDEX, PROVENANCE, REFERENCE_INDEX, ROT, Checkpoint

RECIPES = ROOT / "quant_recipes"
#: (recipe, layout) by name. "several" closes a shard at 100 KB.
LAYOUTS = {
    "w4a8": ("w4a8", "one shard"),
    "w8a8": ("w8a8", "one shard"),
    "w4a8-mlapo": ("w4a8-mlapo", "several"),
    "rtn-w4a8": ("rtn-w4a8", "one shard"),
    "glm-5.2 w4a8c8": ("w4a8c8", "several"),
    "msmodelslim w8a8": ("w8a8", "msmodelslim"),
    "flash-w4a8": ("flash-w4a8", "several"),
}
Quantize = Callable[[str, Path], Path]  # (recipe name or path, source) -> output directory


@dataclass(frozen=True)
class Correct:
    """A checkpoint without a defect, and its source."""

    directory: Path
    source: Path


class Shelf:
    """Makes each checkpoint of `LAYOUTS` once, in `folder`."""

    def __init__(self, folder: Path, source: Path, quantize: Quantize) -> None:
        self.folder, self.source, self.quantize = folder, source, quantize
        self._made: dict[str, Correct] = {}

    def __getitem__(self, name: str) -> Correct:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Correct:
        recipe, layout = LAYOUTS[name]
        source = self.source
        if name.startswith("glm-5.2"):
            source = write_tiny_model(self.folder / "glm52", shards=2, **SHARED_INDEXER)
        if name.startswith("flash"):
            source = write_tiny_flash(self.folder / "flash", shards=2)
        if layout == "several":
            recipe = str(self._small_shards(recipe))
        out = self.quantize(recipe, source)
        if layout == "msmodelslim":
            out = as_msmodelslim(out, self.folder / name)
        return Correct(out, source)

    def _small_shards(self, recipe: str) -> Path:
        path = self.folder / f"{recipe}-small-shards.yaml"
        text = (RECIPES / f"{recipe}.yaml").read_text()
        path.write_text(text.replace("part_file_size: 4", "part_file_size: 0.0001"))
        return path


def as_msmodelslim(directory: Path, out: Path) -> Path:
    """The same tensors as msModelSlim lays them out.

    Its own index name, `rot.weight` in a file of its own and not in the total, no metadata, no scales beside
    deq_scale, and none of our own files.
    """
    shutil.copytree(directory, out)
    for name in (PROVENANCE, "glm5_ascend_recipe.yaml"):
        (out / name).unlink()
    ck = Checkpoint(out)
    ck.store({f"{module}.{s}": None for module in ck.modules("W8A8") for s in ("weight_scale", "weight_offset")})
    names = [name for name in ck.names() if name != ROT]
    files, weight_map = 3, {}
    tensors = {name: ck.read(name) for name in ck.names()}
    for shard in ck.shards:
        (out / shard).unlink()
    for number in range(files):
        file = f"quant_model_weights-{number + 1:05d}-of-{files:05d}.safetensors"
        part = names[number * len(names) // files : (number + 1) * len(names) // files]
        save_file({name: tensors[name] for name in part}, out / file)
        weight_map |= dict.fromkeys(part, file)
    save_file({ROT: tensors[ROT]}, out / "rot.safetensors")
    weight_map[ROT] = "rot.safetensors"
    total = sum(tensors[name].nbytes for name in names)
    (out / INDEX).unlink()
    (out / REFERENCE_INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return out


def assert_clean(report: Report, warnings: set[str] | None = None) -> None:
    assert report.ok, "\n".join(report.lines())
    assert {finding.id for finding in report.findings} <= (warnings or set())
