"""Writing: shards in any order, an output directory that appears whole or not at all, and nobody's files lost."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.output import check_output, copy_serving_files, exclusive, run_dir_of
from glm5_ascend.checkpoint.writer import ShardWriter, TensorSpec
from glm5_ascend.errors import OutputError

TENSORS = {
    "a": torch.randn(4, 6), "b": torch.randn(3).bfloat16(), "c": torch.randint(-128, 127, (5, 7)).to(torch.int8),
    "d": torch.arange(4, dtype=torch.int32), "e": torch.tensor([1.5]),
}  # fmt: skip
SPECS = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def write(writer: ShardWriter, name: str) -> None:
    writer.write_rows(name, 0, TENSORS[name])
    writer.expect_no_more(name)


@pytest.mark.parametrize("shard_bytes", [1, 40, 100, 10**9])
def test_tensors_written_in_any_order_read_back(tmp_path: Path, shard_bytes: int) -> None:
    writer = ShardWriter(tmp_path, SPECS, shard_bytes)
    for name in reversed(TENSORS):
        write(writer, name)
    writer.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    if shard_bytes == 1:
        assert files[0] == "quant_model_weights-00001-of-00005.safetensors"
    read = CheckpointDir(tmp_path)
    for name, tensor in TENSORS.items():
        assert torch.equal(read.read(name), tensor)
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)


def test_writer_refuses_what_was_not_planned(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, SPECS, 100)
    with pytest.raises(ValueError, match=r"a: torch\.float64"):
        writer.write_rows("a", 0, TENSORS["a"].double())
    for start, rows in ((0, TENSORS["a"].T), (3, TENSORS["a"][:2]), (-1, TENSORS["a"][:1])):
        with pytest.raises(ValueError, match="planned"):
            writer.write_rows("a", start, rows)
    with pytest.raises(ValueError, match=r"5 tensors were never written, e\.g\. a"):
        writer.finish()
    writer.close()


def test_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutputError, match="no space left") as error:
        ShardWriter(tmp_path, SPECS, 100)
    assert "\n" not in error.value.message


def test_output_must_not_touch_the_source(tmp_path: Path) -> None:
    source, inside, above = tmp_path / "a" / "source", tmp_path / "a" / "source" / "out", tmp_path / "a"
    source.mkdir(parents=True)
    (tmp_path / "link").symlink_to(source)
    for out, message in (
        (source, "same directory"), (tmp_path / "link", "same directory"), (inside, "inside the source"),
        (above, "contains the source"), (tmp_path / "no" / "where", "no such directory"),
    ):  # fmt: skip
        with pytest.raises(OutputError, match=message):
            check_output(source, out, overwrite=True)
    check_output(source, tmp_path / "new", overwrite=False)


def test_a_second_writer_goes_on_with_the_first_ones_shards(tmp_path: Path) -> None:
    names = list(TENSORS)
    first = ShardWriter(tmp_path, SPECS, 100)
    for name in names[:3]:
        write(first, name)
    first.sync(names[:3])
    first.close()
    second = ShardWriter(tmp_path, SPECS, 100)
    second.expect_no_more(*names[:3])
    second.write_rows("d", 2, TENSORS["d"][2:])
    second.write_rows("d", 0, TENSORS["d"][:2])
    second.expect_no_more("d")
    write(second, "e")
    second.finish()
    read = CheckpointDir(tmp_path)
    assert all(torch.equal(read.read(name), tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("kind", ["folder", "other lock", "link", "linked lock"])
def test_a_users_folder_in_the_place_of_the_run_directory_is_refused(kind: str, tmp_path: Path) -> None:
    run_dir, mine = run_dir_of(tmp_path / "out"), tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    if kind == "link":
        run_dir.symlink_to(mine)
    else:
        run_dir.mkdir()
        (run_dir / "thesis.txt").write_text("mine")
        if kind == "other lock":
            (run_dir / "lock").write_text("mine")
        elif kind == "linked lock":
            (run_dir / "lock").symlink_to(mine / "thesis.txt")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(OutputError, match="not the folder of an unfinished run"), exclusive(run_dir):
        pass
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_one_process_after_the_other(tmp_path: Path) -> None:
    """Also after one that was killed before it wrote its mark."""
    run_dir = run_dir_of(tmp_path / "out")
    run_dir.mkdir()
    with exclusive(run_dir), pytest.raises(OutputError, match="another process"), exclusive(run_dir):
        pass
    (run_dir / "lock").write_bytes(b"")
    with exclusive(run_dir):
        assert (run_dir / "lock").read_bytes()


def test_serving_files_are_copied_without_the_quantization_config(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(), out.mkdir()
    names = ["tokenizer.model", "tokenizer.json", "x.tiktoken", "chat_template.jinja", "generation_config.json"]
    for name in names:
        (source / name).write_bytes(b"\x00" + name.encode())
    (source / "model.safetensors.index.json").write_text("{}")
    config = {
        "model_type": "glm_moe_dsa",
        "quantization_config": {},
        "text_config": {"quantization_config": {}, "x": 1},
    }
    (source / "config.json").write_text(json.dumps(config))
    copy_serving_files(source, config, out)
    assert sorted(path.name for path in out.iterdir()) == sorted([*names, "config.json"])
    assert (out / "tokenizer.model").read_bytes() == b"\x00tokenizer.model"
    assert json.loads((out / "config.json").read_text()) == {"model_type": "glm_moe_dsa", "text_config": {"x": 1}}
    plain = '{"model_type":   "glm_moe_dsa"}'
    (source / "config.json").write_text(plain)
    copy_serving_files(source, json.loads(plain), out)
    assert (out / "config.json").read_text() == plain  # byte for byte when nothing has to go
