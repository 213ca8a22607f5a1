"""What lies in the directory besides the shards: links, special files, pickles, tokenizer; and what may be opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from glm5_ascend.verify.report import Report

#: Unpickling runs code; nothing of a quantized checkpoint is stored this way.
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")

#: Every reader of GLM-5 brings the model's code itself.
_PYTHON = (".py", ".pyc", ".pyo", ".pyd", ".so")


def inside(path: Path, directory: Path) -> bool:
    """Whether `path`, links followed, lies in `directory`, or is a blob of the hub cache it is a snapshot of."""
    # realpath: Path.resolve raises at a ring of links.
    target, home = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
    in_cache = home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / "blobs")
    return target.is_relative_to(home) or in_cache


def check_tree(directory: Path, report: Report) -> set[str]:
    """Report what does not belong there; returns the names of links to the outside, which must not be opened."""
    outside: set[str] = set()
    for entry in _walk(directory):
        path = Path(entry.path)
        name = path.relative_to(directory).as_posix()
        kinds: Path | os.DirEntry[str] = path if entry.is_symlink() else entry  # an entry raises at a ring of links
        if entry.is_symlink() and not inside(path, directory):
            outside.add(name)
            report.error(
                "files.link_outside",
                f"link to {os.readlink(path)}, outside the checkpoint",
                file=name,
                fix="replace the link by the file",
            )
        elif not kinds.is_file() and not kinds.is_dir():
            report.error(
                "files.special",
                "a FIFO, device, socket or a link to nothing: it is not opened",
                file=name,
                fix="remove it, or copy the file again",
            )
        elif path.suffix.lower() in _PICKLES:
            report.error("files.pickle", "pickle files can run code when they are loaded", file=name, fix="remove it")
        elif path.suffix.lower() in _PYTHON:
            report.error(
                "files.python",
                "Python code, which runs where the checkpoint is loaded with trust_remote_code; GLM-5 needs none",
                file=name,
                fix="remove it",
            )
    _check_tokenizer(directory, report)
    return outside


def _walk(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Everything below, links not followed; without recursion, whatever the depth."""
    pending = [os.fspath(directory)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError:  # unreadable, or a path longer than the system takes
            continue
        for entry in found:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)


def _check_tokenizer(directory: Path, report: Report) -> None:
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model")) and not any(
        directory.glob("*.tiktoken")
    ):
        report.warning(
            "files.tokenizer",
            "no tokenizer.json, tokenizer.model or *.tiktoken: the checkpoint cannot be served",
            file="tokenizer.json",
            fix="copy the tokenizer files of the source",
        )
    elif not (directory / "tokenizer_config.json").is_file():
        report.warning(
            "files.tokenizer",
            "not found: the server may choose the wrong tokenizer class",
            file="tokenizer_config.json",
            fix="copy the tokenizer files of the source",
        )
