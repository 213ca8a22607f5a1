"""Hostile inputs by kind: what stands in a file, and the command that meets it; made by hand, and from fixed seeds.

A case is (kind, name, make): `make(folder, source)` writes what it needs into `folder` and returns a command line.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.tiny_model import tiny_config

Make = Callable[[Path, Path], list[str]]


class Case(NamedTuple):
    """One hostile input."""

    kind: str
    name: str
    make: Make


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2.5, 1e9, 2e8, 10**9, 10**30, 10**290, 1e308, "", "x", "\x1b[2J", "字" * 500, [], [1], [[]],
    ["full"], {}, {"a": {}}, "\u202e",
)  # fmt: skip
TEXTS: tuple[bytes, ...] = (
    b"", b"\0" * 100, b"{", b"[1]", b"7", b"null", b'{"a": NaN}', b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe",
    b'{"a": 1' + b"0" * 9000 + b"}", b'{"a": 1e' + b"9" * 400 + b"}", b'{"a": "\\ud800"}', b'{"a": 1, "a": 2}',
    b"- a\n" * 1000, b"a: !!float abc", b"a: 2001-99-99", b"a: &a [*a]", b"!!python/object/apply:os.system [true]",
    b"PK\x03\x04" + bytes(64), b"\x80\x04cos\nsystem\n.", b"<html>", b"%YAML 9.9\n---\n", b"\xf0\x9f\x98",
)  # fmt: skip
#: Those that only read: hundreds of them run.
READERS = (["verify"], ["doctor"], ["serve", "--dry-run"], ["plan"])


def cases() -> list[Case]:
    """All cases, in a fixed order."""
    return [*_config_values(), *_json_files(), *_recipes(), *_machines(), *_irregular(), *_options()]


def _copy(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder / "model"))


def _with_file(file: str, content: bytes | Callable[[Path], object], words: list[str]) -> Make:
    def make(folder: Path, source: Path) -> list[str]:
        model = _copy(source, folder)
        (model / file).unlink(missing_ok=True)
        if isinstance(content, bytes):
            (model / file).write_bytes(content)
        else:
            content(model / file)
        return [words[0], str(model), *words[1:]]

    return make


def _config_values() -> Iterator[Case]:
    keys = [*sorted(tiny_config()), "indexer_types", "index_topk_pattern", "text_config", "quantization_config"]
    for number, (key, value) in enumerate((key, value) for key in keys for value in VALUES):
        words = READERS[number % len(READERS)]
        text = json.dumps(tiny_config() | {key: value}).encode()
        yield Case("config values", f"{key}={value!r:.30} {words[0]}", _with_file("config.json", text, words))


def _json_files() -> Iterator[Case]:
    files = ("config.json", "model.safetensors.index.json", "quant_model_description.json")
    for file in files:
        for number, text in enumerate(TEXTS):
            for words in READERS:
                yield Case("JSON files", f"{file} {number} {words[0]}", _with_file(file, text, words))


def _text_of(option: list[str], suffix: str, text: bytes) -> Make:
    def make(folder: Path, source: Path) -> list[str]:
        (folder / f"hostile{suffix}").write_bytes(text)
        filled = [word.format(file=folder / f"hostile{suffix}", source=source, out=folder / "out") for word in option]
        return filled

    return make


def _recipes() -> Iterator[Case]:
    draw = random.Random(24)
    seeds = [*TEXTS, b"apiversion: glm5_ascend_v1\nmetadata: {config_id: x}\nspec: {process: []}\n"]
    pieces = [*b"[ { - ? : &a *a !!int <<: ' |".split(), b" ", b'"', b"\n", b"\t", b"9" * 400]
    for number in range(200):
        text = seeds[number] if number < len(seeds) else b"".join(draw.choices(pieces, k=draw.randrange(1, 60)))
        option = ["quantize", "{source}", "{out}", "--dry-run", "--recipe", "{file}"]
        yield Case("recipes", str(number), _text_of(option, ".yaml", text))


def _machines() -> Iterator[Case]:
    option = ["plan", "--model", "glm-5", "--hardware", "{file}"]
    for number, text in enumerate(TEXTS):
        yield Case("machines", str(number), _text_of(option, ".yaml", text))


def _irregular() -> Iterator[Case]:
    kinds: dict[str, Callable[[Path], object]] = {
        "fifo": os.mkfifo, "folder": os.mkdir, "zero": lambda path: os.symlink("/dev/zero", path),
        "loop": lambda path: os.symlink(path, path), "gone": lambda path: os.symlink("nowhere", path),
    }  # fmt: skip
    files = ("config.json", "model.safetensors.index.json", "quant_model_description.json")
    for file in files:
        for kind, put in kinds.items():
            for words in READERS:
                yield Case("irregular files", f"{file} {kind} {words[0]}", _with_file(file, put, words))


def _options() -> Iterator[Case]:
    values = ("", "x", "x" * 5000, "-1", "0", "1e31", "9" * 400, "nan", "inf", "\x1b[2J", "/dev/zero", "{", "\u202e")
    lines = (
        ["quantize", "{source}", "{out}", "--dry-run", "--max-ram=@"], ["quantize", "{source}", "{out}", "--seed=@"],
        ["quantize", "{source}", "{out}", "--device=@", "--dry-run"], ["quantize", "{source}", "{out}", "--recipe=@"],
        ["plan", "--model", "glm-5", "--acceptance=@"], ["plan", "--model", "glm-5", "--workload=in=1024,out=@"],
        ["plan", "--model", "glm-5", "--workload=in=1024,out=64,requests=@"], ["plan", "--model=@"],
        ["plan", "--model", "glm-5", "--hardware=@"], ["plan", "--model", "glm-5", "--layout=tp=@"],
        ["serve", "{source}", "--dry-run", "--", "--port=@"], ["serve", "{source}", "--dry-run", "--profile=@"],
        ["serve", "{source}", "--dry-run", "--profile=cpu", "--", "--port=@"],
        ["deploy", "render", "--to", "shell", "--out", "{out}", "--profile=@"], ["smoke", "http://@"],
        ["eval", "--against", "{source}", "--url=@"],
        ["deploy", "render", "--to", "shell", "--out", "{out}", "--profile", "a3-2node", "--model=@"],
    )  # fmt: skip
    for line in lines:
        for value in values:

            def make(folder: Path, source: Path, line: list[str] = line, value: str = value) -> list[str]:
                words = {"{source}": str(source), "{out}": str(folder / "out")}
                return [words.get(word, word.replace("@", value)) for word in line]

            yield Case("options", f"{' '.join(line)} {value[:20]!r}", make)
