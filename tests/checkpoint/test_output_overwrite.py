"""An output in the place of an older one: replaced at once, and a user's files are kept."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from glm5_ascend.checkpoint.output import check_output, exclusive, file_facts, publish, run_dir_of
from glm5_ascend.errors import OutputError


def test_overwrite_replaces_only_what_we_wrote(tmp_path: Path, tiny_source: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="not empty") as error:
        check_output(tiny_source, out, overwrite=False)
    assert "--overwrite" in error.value.tip
    with pytest.raises(OutputError, match="not written by this tool"):
        check_output(tiny_source, out, overwrite=True)
    (out / "glm5_ascend_provenance.json").write_text(json.dumps({"files": ["glm5_ascend_provenance.json"]}))
    with pytest.raises(OutputError, match=r"thesis\.txt: not as this tool wrote it"):
        check_output(tiny_source, out, overwrite=True)
    (out / "thesis.txt").unlink()
    check_output(tiny_source, out, overwrite=True)


def test_publishing_replaces_the_old_directory_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for text in ("first", "second"):
        work_dir = run_dir_of(out)
        with exclusive(work_dir):
            (work_dir / "checkpoint").mkdir()
            (work_dir / "checkpoint" / text).write_text("x")
            publish(work_dir / "checkpoint", out)
        assert [path.name for path in out.iterdir()] == [text]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial", "out"]


def test_a_failed_publishing_puts_the_old_directory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir(), work.mkdir()
    (out / "old").write_text("x")
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self == work:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OutputError, match="Input/output error"):
        publish(work, out)
    assert (out / "old").exists()


def recorded(out: Path, **changes: object) -> None:
    """A provenance over the files of a folder."""
    names = [path.name for path in out.iterdir()]
    record = {"files": [*names, "glm5_ascend_provenance.json"], "outputs": file_facts(out, names)}
    (out / "glm5_ascend_provenance.json").write_text(json.dumps(record | changes))


def test_only_recorded_files_are_replaced(tmp_path: Path, tiny_source: Path) -> None:
    """A file of another size or content, a link to the same bytes, and one that is not in the record are refused."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("ours")
    recorded(out)
    check_output(tiny_source, out, overwrite=True)

    def refused() -> None:
        with pytest.raises(OutputError, match=r"config\.json: not as this tool wrote it"):
            check_output(tiny_source, out, overwrite=True)

    (out / "config.json").write_text("mine")
    refused()
    (out / "config.json").write_text("years of work")
    refused()
    (out / "config.json").unlink()
    (tmp_path / "mine").write_text("ours")
    (out / "config.json").symlink_to(tmp_path / "mine")
    refused()
    (out / "config.json").unlink()
    (tmp_path / "mine").rename(out / "config.json")
    recorded(out, outputs={})
    refused()


@pytest.mark.parametrize(
    "record",
    [{"files": 3}, {"files": [["a"]], "outputs": 3}, {"files": ["a"], "outputs": {"a": {"sha256": ""}}},
     {"files": ["a"], "outputs": {"a": None}}],
)  # fmt: skip
def test_a_strange_record_is_none(record: dict[str, object], tmp_path: Path, tiny_source: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "glm5_ascend_provenance.json").write_text(json.dumps(record))
    (tmp_path / "out" / "a").write_text("x")
    with pytest.raises(OutputError, match=r"not written by this tool|not as this tool wrote it"):
        check_output(tiny_source, tmp_path / "out", overwrite=True)
