"""Memory of calibration does not grow with its text: counted in bytes of live tensors, which no load changes."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch

from glm5_ascend.quantize import quantize
from glm5_ascend.quantize.calibration.stream import Stream
from glm5_ascend.quantize.methods.input_statistics import InputStatistics

SEQUENCES = 12


def live_bytes() -> int:
    """Bytes of all tensors that are alive, views of one storage counted once; those of tracers hold none."""
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_a_sequence_leaves_nothing_but_its_stream(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In front of each layer's sixth and last sequence the same bytes are held.

    Sequences are computed in one thread, and another one takes their results: the counts wait for it.
    """
    live: dict[str, list[int]] = {}
    write = Stream.set_sequence

    def counted(stream: Stream, index: int, values: torch.Tensor) -> None:
        if not stream.path.name.startswith("stream-"):
            write(stream, index, values)
            return
        counts, deadline = live.setdefault(stream.path.name, []), time.monotonic() + 60
        if index == 5:
            time.sleep(0.2)
            counts.append(live_bytes())
        elif index == SEQUENCES - 1:
            while (last := live_bytes()) != counts[0] and time.monotonic() < deadline:
                time.sleep(0.01)
            counts.append(last)
        write(stream, index, values)

    monkeypatch.setattr(Stream, "set_sequence", counted)
    calib = tmp_path / "calib.txt"
    calib.write_text("".join(f"{number:03d} {'abcdefgh' * 12}\n" for number in range(SEQUENCES)))
    out, few = tmp_path / "out", {"samples": SEQUENCES, "seq_len": 48, "threads": 1}
    quantize(tiny_source, out, recipe="w4a8-best", calib=calib, **few)
    assert {"stream-0", "stream-1", "stream-2"} <= live.keys()
    assert {name: late - early for name, (early, late) in live.items()} == dict.fromkeys(live, 0)


def test_an_input_of_many_tokens_keeps_its_rows_alone() -> None:
    seen = InputStatistics(8, 8000)
    for number in range(1000):
        seen.add(torch.full((8, 16), float(number)))
    tensors = [value for value in vars(seen).values() if isinstance(value, torch.Tensor)]
    assert seen.rows.shape == (8, 16) and sum(t.untyped_storage().nbytes() for t in tensors) == (8 + 3) * 16 * 4
