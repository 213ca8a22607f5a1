"""Calibration and evaluation texts begin as the model's chat template begins prompts; chats are not begun inside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from glm5_ascend.checkpoint.texts import Packer, Piece, opening
from glm5_ascend.checkpoint.tokenizer import SourceTokenizer
from glm5_ascend.fidelity.evaluation.windows import read_tasks
from glm5_ascend.quantize.calibration.dataset import load_calibration
from tests.support.tiny_model import VOCAB_SIZE, write_tokenizer

REST = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (f"[gMASK]<sop>{REST}", "[gMASK]<sop>"),
        ("{#- Who wrote it. -#}\n{%- macro x(y) -%}{{ y }}{%- endmacro -%}\n[gMASK]<sop>\n{%- set z = 1 -%}" + REST,
         "[gMASK]<sop>"),
        (f"{{%- set z = namespace(a=1) -%}}[gMASK]{REST}", "[gMASK]"),
        (f"[gMASK]<sop><|user|>{REST}", "[gMASK]<sop>"),
        (REST, ""),
        (f"{{% if tools %}}[gMASK]<sop>{{% endif %}}{REST}", ""),
        (f"{{{{ bos }}}}[gMASK]{REST}", "[gMASK]"),
        (f"[INST]{REST}", ""),  # no token of this tokenizer
        ("{% for", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_what_a_template_begins_with(template: str, expected: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = SourceTokenizer(tmp_path)
    text, ids = opening(tokenizer)
    assert (text, ids) == (expected, tokenizer.encode(expected))
    (tmp_path / "chat_template.jinja").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert opening(SourceTokenizer(tmp_path)) == ("", [])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    assert opening(SourceTokenizer(tmp_path))[0] == expected


def packed(pieces: list[Piece]) -> tuple[list[list[int]], list[int]]:
    packer = Packer(6, [90, 91])
    return [sequence for piece in pieces for sequence in packer.add(piece)], packer.rest


def test_sequences_of_texts_begin_with_the_opening() -> None:
    long = Piece("", list(range(10)))
    assert packed([long]) == ([[90, 91, 0, 1, 2, 3], [90, 91, 4, 5, 6, 7]], [90, 91, 8, 9])
    assert packed([Piece("", [1, 2]), Piece("", [3])]) == ([[90, 91, 1, 2, 90, 91]], [90, 91, 3])
    assert packed([Piece("", [90, 91, 5])]) == ([], [90, 91, 5])  # has it already
    parts = [Piece("", [1, 2, 3]), Piece("", [4, 5], begins=False)]
    assert packed(parts) == ([[90, 91, 1, 2, 3, 4]], [90, 91, 5])


def test_no_sequence_begins_inside_a_chat() -> None:
    first, second = (Piece("", [90, 91, *range(n, n + 5)], may_begin=False) for n in (0, 20))
    assert packed([first, second]) == ([[90, 91, 0, 1, 2, 3], [90, 91, 20, 21, 22, 23]], [])
    parts = [Piece("", [90, 91, 0, 1, 2, 3, 4], may_begin=False), Piece("", [5, 6], begins=False, may_begin=False)]
    assert packed([*parts, second]) == ([[90, 91, 0, 1, 2, 3], [90, 91, 20, 21, 22, 23]], [])


def test_calibration_and_windows(tiny_source: Path, tmp_path: Path) -> None:
    ids = opening(SourceTokenizer(tiny_source))[1]
    assert len(ids) == 2
    chat = {"messages": [{"role": "user", "content": "a" * 50}, {"role": "assistant", "content": "b" * 50}]}
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("".join(json.dumps(record) + "\n" for record in (chat, "words " * 40, chat, chat)))
    calibration = load_calibration(mixed, tiny_source, VOCAB_SIZE, 8, 64)
    assert calibration.opening == "[gMASK]<sop>"
    assert len(calibration.sequences) >= 6 and all(s[:2].tolist() == ids for s in calibration.sequences)
    (tmp_path / "text.txt").write_text("many words " * 60)
    for path in (mixed, tmp_path / "text.txt", None):
        windows = read_tasks(path, tiny_source, 32, 8).windows
        assert len(windows) == 8 and all(len(w) == 32 and w[:2].tolist() == ids for w in windows)
    other = Path(shutil.copytree(tiny_source, tmp_path / "other"))
    (other / "chat_template.jinja").write_text(REST)
    assert (
        read_tasks(None, other, 32, 1).windows[0][:30].tolist()
        == read_tasks(None, tiny_source, 32, 1).windows[0][2:].tolist()
    )
