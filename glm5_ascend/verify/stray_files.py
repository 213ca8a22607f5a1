"""Checks of the other files of the directory: links, special files, pickles, code, other formats."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from glm5_ascend.checkpoint.checks.loaded_checkpoint import inside
from glm5_ascend.checkpoint.checks.report import Report

#: Unpickling runs code; nothing of a quantized checkpoint is stored this way.
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")

#: Weights of other formats and containers of code: nothing of this format is stored so.
_FOREIGN_WEIGHTS = (".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".tflite")
#: Files at the top of the directory that some reader uses: name -> effect.
_TAKEN = {
    "hf_quant_config.json": "vLLM reads a quantization_config from it and would never open the description",
    "adapter_config.json": "transformers would load an adapter on top of the weights",
    "params.json": "with consolidated*.safetensors vLLM takes it for the config of another format",
    "tekken.json": "with consolidated*.safetensors vLLM takes it for the tokenizer",
    "consolidated.safetensors.index.json": "an index of another format's shards",
    "pytorch_model.bin.index.json": "an index of pickles",
}
#: The only safetensors file below the top, which no engine loads as weights.
_BELOW = "optional/quarot.safetensors"

#: Every reader of GLM-5 brings the model's code itself.
_PYTHON = (".py", ".pyc", ".pyo", ".pyd", ".so")


def check_tree(directory: Path, report: Report) -> set[str]:
    """Report files that do not belong there; return links to the outside, which must not be opened."""
    outside: set[str] = set()
    for entry in _walk(directory):
        path = Path(entry.path)
        name = path.relative_to(directory).as_posix()
        kinds: Path | os.DirEntry[str] = path if entry.is_symlink() else entry  # an entry raises at a ring of links
        if entry.is_symlink() and not inside(path, directory):
            outside.add(name)
            why = f"link to {os.readlink(path)}, outside the checkpoint"
            report.error("files.link_outside", why, file=name, fix="replace the link by the file")
        elif not kinds.is_file() and not kinds.is_dir():
            why = "a FIFO, device, socket or a link to nothing: it is not opened"
            report.error("files.special", why, file=name, fix="remove it, or copy the file again")
        elif path.suffix.lower() in _PICKLES:
            report.error("files.pickle", "pickle files can run code when they are loaded", file=name, fix="remove it")
        elif path.suffix.lower() in _PYTHON:
            why = "Python code, which runs where the checkpoint is loaded with trust_remote_code; GLM-5 needs none"
            report.error("files.python", why, file=name, fix="remove it")
        else:
            _check_foreign(name, report)
    return outside


def _walk(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all entries below, links not followed; without recursion, for any depth."""
    pending = [os.fspath(directory)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                children = sorted(entries, key=lambda entry: entry.name)
        except OSError:  # unreadable, or a path longer than the system takes
            continue
        for entry in children:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)


def _check_foreign(name: str, report: Report) -> None:
    """Report files of other formats that a reader would prefer, and shards in folders that are not read."""
    suffix = os.path.splitext(name)[1].lower()
    if name in _TAKEN or (name.startswith("consolidated") and suffix == ".safetensors"):
        why = _TAKEN.get(name, "with params.json vLLM takes it for the weights of another format")
        say = report.error if name == "hf_quant_config.json" else report.warning
        say("files.foreign", f"not of this format: {why}", file=name, fix="remove it")
    elif suffix in _FOREIGN_WEIGHTS:
        report.warning("files.foreign", "weights of another format: not read, not checked", file=name, fix="remove it")
    elif suffix == ".safetensors" and "/" in name and name != _BELOW:
        report.warning(
            "files.foreign", "no engine reads shards in this folder: a stray copy?", file=name, fix="remove it"
        )
