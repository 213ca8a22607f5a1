"""Load a checkpoint as SGLang does, and write what the parameters hold, before and after it works on them.

Everything is filled with a value that no file holds before the weights come.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sglang_on_cpu import start  # isort: skip  # before SGLang

import torch
from safetensors.torch import save_file
from sglang.srt.model_loader.utils import set_default_torch_dtype


def loaded(config: Any, before: dict[str, torch.Tensor] | None = None) -> torch.nn.Module:
    """A model, ready to compute; `before` gets its parameters as they came from the files."""
    load = start.loader()
    model = load.initialize_model_for_startup(model_config=config, device_config=start.DEVICE)
    if before is not None:
        for name, parameter in model.named_parameters():
            # Biases of other norms are zero and in no file.
            if not re.search(r"norm[12]?\.bias$", name) or name.endswith("indexer.k_norm.bias"):
                parameter.data.fill_(float("nan") if parameter.dtype.is_floating_point else -99)
    with set_default_torch_dtype(config.dtype):
        load.load_weights_only(model, load._get_all_weights(config, model), torch.device("cpu"))
        if before is not None:
            before |= own(dict(model.named_parameters()))
        load.postprocess_weights(model, torch.device("cpu"))
    return model.eval()


def own(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def contents(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, the two halves of kv_b_proj, and the rotation of a draft, by name."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, module in model.named_modules():
        for attribute in ("w_kc", "w_vc", "rot_weight"):
            value = getattr(module, attribute, None)
            if isinstance(value, torch.Tensor):
                tensors[f"{name}.{attribute}"] = value
    return own(tensors)


def write(name: str, config: Any, out: Path) -> dict[str, Any]:
    before: dict[str, torch.Tensor] = {}
    model = loaded(config, before)
    save_file(before, out / f"{name}-before.safetensors")
    save_file(contents(model), out / f"{name}-after.safetensors")
    schemes = {
        module_name: type(module.scheme).__name__
        for module_name, module in model.named_modules()
        if getattr(module, "scheme", None) is not None
    }
    return {"model": type(model).__name__, "quantization": config.quantization, "schemes": schemes}


def run(checkpoint: str, out: Path, rank: int = 0, port: int | None = None, mtp: bool = True, **arguments: Any) -> None:
    """Target, and with `mtp` the draft; `arguments` are those of ServerArgs."""
    args = start.engine(checkpoint, rank, port, **(start.MTP if mtp else {}) | arguments)
    report = {"target": write("target", start.model_config(args), out)}
    if mtp:
        report["draft"] = write("draft", start.model_config(args, draft=True), out)
    (out / "report.json").write_text(json.dumps(report, indent=1))
