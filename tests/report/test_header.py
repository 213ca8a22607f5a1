"""Where a report says it comes from."""

from __future__ import annotations

import hashlib
import shlex
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from glm5_ascend.cli import run
from glm5_ascend.report.header import COMMAND, hashed_file, hashed_text, make_header, without_login


def test_it_states_date_command_versions_and_machine() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2)))
    token = COMMAND.set(("eval", "a dir", "--url", "http://me:pw@host"))
    try:
        header = make_header(seed="7", recipe="w4a8, SHA-256 12", now=now)
    finally:
        COMMAND.reset(token)
    rows = dict(header.rows())
    assert rows["date"] == "2026-01-02 01:04:05 UTC" and rows["seed"] == "7" and "text" not in rows
    assert shlex.split(header.command) == ["glm5-ascend", "eval", "a dir", "--url", "http://***@host"]
    assert {"glm5-ascend", "Python", "torch"} <= set(rows) and "GB of memory" in rows["machine"]


def test_the_date_can_be_set_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert make_header().date == datetime(1970, 1, 2, tzinfo=UTC)


def test_a_command_that_ended_is_not_named() -> None:
    assert run(["plan", "--nodes", "0"]) == 2
    assert COMMAND.get() is None


def test_logins_are_masked() -> None:
    assert without_login("http://me:pw@host:8000/v1") == "http://***@host:8000/v1"
    assert without_login("http://host/a@b") == "http://host/a@b"


def test_hashes(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"abc")
    expected = hashlib.sha256(b"abc").hexdigest()
    assert hashed_file(tmp_path / "text").sha256 == hashed_text("name", "abc").sha256 == expected
    assert str(hashed_text("name", "abc")) == f"name, SHA-256 {expected}"
