"""`quantize --upgrade`: an output whose `rot.weight` lies in a shard, as earlier versions wrote it, becomes today's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from glm5_ascend.checkpoint.output import PROVENANCE_NAME, file_facts, workshop
from glm5_ascend.checkpoint.writer import ShardWriter
from glm5_ascend.cli import run
from glm5_ascend.errors import CheckpointError, OutputError
from glm5_ascend.quantize import pipeline, upgrade, upgrade_output
from glm5_ascend.quantize.recipe import find_recipe
from glm5_ascend.verify import verify
from tests.quantize.support.kill_runs import digest
from tests.support.tiny_model import quantize_tiny

DESCRIPTION = "quant_model_description.json"
INDEX = "model.safetensors.index.json"
SHARD = "quant_model_weights-00001-of-00001.safetensors"
Quantized = Callable[..., Path]


def quantize_as_before(source: Path, out: Path, recipe: str) -> Path:
    """What the versions before `rot.safetensors` wrote, provenance included."""

    def without_files_of_their_own(work: Path, specs: Any, shard_bytes: int, _: object) -> ShardWriter:
        return ShardWriter(work, specs, shard_bytes)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline, "ShardWriter", without_files_of_their_own)
        return quantize_tiny(source, out, recipe)


@pytest.fixture
def old(tiny_source: Path, tmp_path: Path) -> Path:
    made = quantize_as_before(tiny_source, tmp_path / "made", "w4a8")
    (tmp_path / "old").mkdir()
    return made.rename(tmp_path / "old" / "w4a8")


def small_shards(folder: Path, size: float) -> str:
    raw = yaml.safe_load(find_recipe("w4a8").read_text())
    raw["spec"]["save"] = [{"type": "ascendv1_saver", "part_file_size": size}]
    (folder / "small.yaml").write_text(yaml.safe_dump(raw))
    return str(folder / "small.yaml")


def test_it_becomes_what_is_written_today(old: Path, tiny_w4a8: Path, tiny_source: Path) -> None:
    (finding,) = verify(old).findings
    assert (finding.id, finding.level, finding.file) == ("mtp.rot_file", "error", SHARD)
    assert finding.fix == f"glm5-ascend quantize --upgrade {old}"
    before = load_file(old / SHARD)
    done = upgrade_output(old)
    assert done.written == sorted([PROVENANCE_NAME, INDEX, SHARD, "rot.safetensors"])
    assert digest(old) == digest(tiny_w4a8)
    assert load_file(old / "rot.safetensors").keys() == {"rot.weight"}
    after = load_file(old / SHARD) | load_file(old / "rot.safetensors")
    assert after.keys() == before.keys() and all((after[name] == before[name]).all() for name in before)
    assert verify(old, against=tiny_source).findings == []
    assert upgrade_output(old).written == [] and list(old.parent.iterdir()) == [old]


@pytest.mark.parametrize("size", [1e-4, 2e-6])
def test_of_many_shards_only_that_with_the_tensor_is_written(size: float, tiny_source: Path, tmp_path: Path) -> None:
    """In the smaller ones the tensor is alone already: its shard is the new file."""
    out = quantize_as_before(tiny_source, tmp_path / "out", small_shards(tmp_path, size))
    home = json.loads((out / INDEX).read_text())["weight_map"]["rot.weight"]
    before = {path.name: path.stat().st_ino for path in out.iterdir()}
    alone = len(load_file(out / home)) == 1
    assert alone == (size == 2e-6) and len(before) > 10
    done = upgrade_output(out)
    assert (home in done.written) is not alone and (out / home).exists() is not alone
    after = {path.name: path.stat().st_ino for path in out.iterdir()}
    assert {name for name in before if after.get(name) != before[name]} == {home, INDEX, PROVENANCE_NAME, "optional"}
    assert verify(out, against=tiny_source).findings == []


def test_killed_at_any_place_it_goes_on(old: Path, tiny_w4a8: Path, tmp_path: Path) -> None:
    """kill -9 before the first, second, ... change of the disk: DIR is whole, or comes back with the same command."""
    wanted, before = digest(tiny_w4a8), digest(old)
    here, kept, kills = old.parent, shutil.copytree(old, tmp_path / "kept"), 0
    while True:
        child = os.fork()
        if child == 0:
            _killed_before(kills, here)
            upgrade_output(old)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            break
        assert not old.exists() or digest(old) in (before, wanted)
        upgrade_output(old)
        assert digest(old) == wanted and list(here.iterdir()) == [old]
        shutil.rmtree(old)
        shutil.copytree(kept, old)
        kills += 1
    assert os.waitstatus_to_exitcode(status) == 0 and kills > 20


def _killed_before(count: int, here: Path) -> None:
    left = count

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        writes = event in ("os.link", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod")
        writes |= event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if writes and str(arguments[0]).startswith(str(here)):
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(watch)


@pytest.mark.parametrize("kind", ["no record", "damaged", "linked", "other file", "unfinished run", "link", "none"])
def test_what_is_not_ours_is_refused_and_not_touched(kind: str, old: Path, tmp_path: Path) -> None:
    where, error, words = old, OutputError, "not written by this tool"
    if kind == "no record":
        (old / PROVENANCE_NAME).unlink()
    elif kind == "damaged":
        data = bytearray((old / SHARD).read_bytes())
        data[len(data) // 2] ^= 1
        (old / SHARD).write_bytes(data)
        words = f"{SHARD}: not as this tool wrote it"
    elif kind == "linked":
        (old / SHARD).rename(tmp_path / "elsewhere")
        (old / SHARD).symlink_to(tmp_path / "elsewhere")
        words = f"{SHARD}: not as this tool wrote it"
    elif kind == "other file":
        save_file({"rot.weight": load_file(old / SHARD)["rot.weight"] * 2}, old / "rot.safetensors")
        words = "in the way"
    elif kind == "unfinished run":
        workshop(old).mkdir()
        (workshop(old) / "lock").write_bytes(b"")
        words = "not the folder of an unfinished run"
        (workshop(old) / "journal.jsonl").write_text("{}\n")
    elif kind == "link":
        where = tmp_path / "link"
        where.symlink_to(old)
    else:
        where, words = tmp_path / "nowhere", "no such directory"
    before = digest(old)
    with pytest.raises(error, match=words):
        upgrade_output(where)
    assert digest(old) == before and not (old.parent / ".w4a8.replaced").exists()


def test_an_unfinished_run_of_the_same_place_comes_first(old: Path) -> None:
    place = workshop(old)
    place.mkdir()
    (place / "lock").write_bytes(b"glm5-ascend: an unfinished run\n")
    (place / "journal.jsonl").write_text("{}\n")
    with pytest.raises(OutputError, match="holds an unfinished run"):
        upgrade_output(old)
    assert (place / "journal.jsonl").read_text() == "{}\n"


def test_a_damaged_index_is_refused(old: Path) -> None:
    (old / INDEX).write_text("{")
    with pytest.raises(CheckpointError):
        upgrade_output(old)
    assert list(old.parent.iterdir()) == [old]


def test_a_users_own_files_stay(old: Path, tiny_w4a8: Path) -> None:
    """Also the file that a user made for SGLang by hand, if it is the same tensor."""
    (old / "notes").mkdir()
    (old / "notes" / "mine.txt").write_text("mine")
    (old / "chat_template.jinja").write_text("mine")
    save_file({"rot.weight": load_file(old / SHARD)["rot.weight"]}, old / "rot.safetensors")
    upgrade_output(old)
    assert (old / "notes" / "mine.txt").read_text() == (old / "chat_template.jinja").read_text() == "mine"
    record = json.loads((old / PROVENANCE_NAME).read_text())
    assert record == json.loads((tiny_w4a8 / PROVENANCE_NAME).read_text())  # an edit is still seen by verify


@pytest.mark.parametrize("name", ["mine.txt", "notes/mine.txt", "chat_template.jinja"])
def test_what_a_user_writes_meanwhile_stays(
    name: str, old: Path, tiny_w4a8: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the files of the old directory were linked, before the new one takes its place."""
    renewed = upgrade._renewed

    def written_meanwhile(*arguments: Any) -> dict[str, Any]:
        (old / name).parent.mkdir(exist_ok=True)
        (old / name).unlink(missing_ok=True)
        (old / name).write_text("mine")
        return renewed(*arguments)

    monkeypatch.setattr(upgrade, "_renewed", written_meanwhile)
    assert run(["quantize", "--upgrade", str(old)]) == 0
    (kept,) = old.parent.glob("w4a8.before-*")
    assert (kept / name).read_text() == "mine" and str(kept) in capsys.readouterr().err.replace("\n", "")
    assert digest(old) == digest(tiny_w4a8)


@pytest.mark.parametrize("moves", [False, True])
def test_int8_caches_get_the_engines_word(moves: bool, tiny_source: Path, tmp_path: Path) -> None:
    """Alone, and together with the move of `rot.weight`."""
    today = quantize_tiny(tiny_source, tmp_path / "today", "w4a8c8")
    made = quantize_as_before if moves else quantize_tiny
    out = made(tiny_source, tmp_path / "out", "w4a8c8")
    text = (out / DESCRIPTION).read_text()
    (out / DESCRIPTION).write_text(text.replace('.indexer.quant_type": "INT8', '.indexer.quant_type": "QK_INT8'))
    record = json.loads((out / PROVENANCE_NAME).read_text())
    record["outputs"] |= file_facts(out, [DESCRIPTION])
    (out / PROVENANCE_NAME).write_text(json.dumps(record))
    caches = [found for found in verify(out).findings if found.id == "description.cache"]
    assert caches and {found.fix for found in caches} == {f"glm5-ascend quantize --upgrade {out}"}
    rot = [INDEX, SHARD, "rot.safetensors"] if moves else []
    assert upgrade_output(out).written == sorted([PROVENANCE_NAME, DESCRIPTION, *rot])
    assert digest(out) == digest(today) and verify(out, against=tiny_source).findings == []
    assert upgrade_output(out).written == []


def test_without_a_rotation_there_is_nothing_to_do(tiny_source: Path, tmp_path: Path) -> None:
    out = quantize_tiny(tiny_source, tmp_path / "out", "rtn-w4a8")
    before = digest(out)
    assert upgrade_output(out).written == [] and digest(out) == before and not workshop(out).exists()


def test_the_command(old: Path, tiny_w4a8: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "SRC", "OUT", "--upgrade", str(old)]) == 2
    assert "give no SRC, OUT" in " ".join(capsys.readouterr().err.split())
    assert run(["quantize", "--upgrade", str(old), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] and shown["out"] == str(old) and "rot.safetensors" in shown["written"] and not shown["kept"]
    assert run(["quantize", "--upgrade", str(old)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert digest(old) == digest(tiny_w4a8)
