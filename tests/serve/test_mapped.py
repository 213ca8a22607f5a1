"""Weights that stay where the checkpoint's files are mapped."""

from __future__ import annotations

import itertools
import mmap
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from glm5_ascend.serve.memory import FROM_DISK
from glm5_ascend.serve.plugin import mapped_files
from tests.support.page_cache import cached, evict
from tests.support.server_process import wait_for


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tensors = {"whole": torch.ones(512, 8192, dtype=torch.int8), "narrow": torch.ones(4, 96, dtype=torch.int8)}
    save_file(tensors | {"wide": torch.ones(4, 64)}, tmp_path / "model.safetensors")
    return tmp_path


def load(directory: Path, name: str) -> torch.Tensor:
    return dict(mapped_files.mapped_files(directory).tensors())[name]


def resident(file: Path) -> int:
    """Bytes of a mapped file in this process's memory."""
    text, total, inside = Path("/proc/self/smaps").read_text(), 0, False
    for line in text.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_a_loaded_tensor_is_a_view_of_the_file(directory: Path) -> None:
    """Nothing is read before it is needed."""
    tensor = load(directory, "whole")
    assert resident(directory / "model.safetensors") < tensor.nbytes / 2
    assert int(tensor.sum()) == 512 * 8192
    assert resident(directory / "model.safetensors") >= tensor.nbytes


@pytest.mark.parametrize("fits", [True, False])
def test_files_that_fit_are_read_at_once(
    fits: bool, directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights in files and the cache must fit together; the draft model follows the target."""
    tensor = load(directory, "whole")
    from_page = tensor.data_ptr() % mmap.PAGESIZE + tensor.nbytes
    monkeypatch.setattr(mapped_files, "available_memory", lambda: from_page + 1000 + fits)
    files = mapped_files.mapped_files(directory)
    assert files.read_ahead([tensor, torch.ones(10**6)], cache_bytes=1000) == fits
    assert (resident(directory / "model.safetensors") >= tensor.nbytes) == fits
    monkeypatch.setattr(mapped_files, "available_memory", lambda: 10**12)
    assert files.read_ahead([tensor]) == fits
    assert capfd.readouterr().err == ("" if fits else 2 * f"{FROM_DISK}\n")


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_part_first(rank: int, split: int, directory: Path) -> None:
    """A rank reads its rows; of a tensor of which every rank has columns, half of the rows."""
    save_file({"large": torch.ones(4096, 8192, dtype=torch.int8)}, directory / "model.safetensors")
    part = load(directory, "large").chunk(2, dim=split)[rank]
    mapped_files.mapped_files(directory).read_ahead([part], rank=rank, ranks=2)
    assert part.numel() <= resident(directory / "model.safetensors") < 1.5 * part.numel()  # in whole huge pages


def test_only_whole_parameters_and_rows_of_a_rank_stay_in_the_file(directory: Path) -> None:
    pytest.importorskip("vllm")
    from glm5_ascend.serve.plugin.loaders import mapped

    copied: list[torch.Tensor] = []
    loader = mapped(lambda param, loaded, *shard: copied.append(loaded), SimpleNamespace(tp_rank=0, tp_size=1))
    whole, narrow, wide = (load(directory, name) for name in ("whole", "narrow", "wide"))
    whole_parameter = torch.nn.Parameter(torch.empty_like(whole), requires_grad=False)
    loader(whole_parameter, whole)
    assert whole_parameter.data_ptr() == whole.data_ptr() and not copied
    fused = torch.nn.Parameter(torch.empty(1024, 8192, dtype=torch.int8), requires_grad=False)
    other_type = torch.nn.Parameter(torch.empty(4, 64, dtype=torch.bfloat16), requires_grad=False)
    no_whole_vectors = torch.nn.Parameter(torch.empty_like(narrow), requires_grad=False)
    loader(fused, whole)
    loader(whole_parameter, whole, 0)  # a part of a fused parameter, even if it is as large
    loader(other_type, wide)
    loader(no_whole_vectors, narrow)
    assert len(copied) == 4
    second = mapped(lambda param, loaded, *shard: copied.append(loaded), SimpleNamespace(tp_rank=1, tp_size=2))
    rows, columns = (
        torch.nn.Parameter(torch.empty(shape, dtype=torch.int8), requires_grad=False)
        for shape in ((256, 8192), (512, 4096))
    )
    second(rows, whole)
    assert rows.data_ptr() == whole[256:].data_ptr() and len(copied) == 4
    second(columns, whole)
    assert copied[4] is whole


@pytest.fixture
def cold(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Mapped tensors a, b and c, 32 MiB each, of which nothing is in memory."""
    path = tmp_path / "model.safetensors"
    save_file({name: torch.ones(2**25, dtype=torch.int8) for name in "abc"}, path)
    evict(path, path.stat().st_size)
    tensors = dict(mapped_files.mapped_files(tmp_path).tensors())
    assert cached(tensors["b"]) == 0
    return tensors


def test_only_what_is_needed_is_read(cold: dict[str, torch.Tensor]) -> None:
    """Nothing by mapping a tensor, and `will_need` nothing around it; a plain access reads megabytes around."""
    part = cold["b"][2**24 : 2**24 + 8192]
    mapped_files.will_need([part])
    assert int(part.sum()) == 8192
    assert 8192 <= cached(cold["b"]) <= 8192 + 2 * mmap.PAGESIZE


def test_an_embedding_is_read_but_not_mapped(cold: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Linux has all of it, this process the rows that it uses."""
    assert mapped_files.mapped_files(tmp_path).read_ahead([cold["a"]], embeddings=[cold["b"]])
    wait_for(lambda: cached(cold["b"]) > 2**25 - 2**14, "the pages", 60)
    assert int(cold["b"][2**24 : 2**24 + 8192].sum()) == 8192
    assert 2**25 <= resident(tmp_path / "model.safetensors") < 2**25 + 2**23  # huge pages


@pytest.mark.parametrize("populate", [22, -1], ids=["now", "before Linux 5.14"])
def test_a_reader_reads_the_next_step(
    populate: int, cold: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the module that is called next, the first one's after the last, and nothing else."""
    monkeypatch.setattr(mapped_files, "_MADV_POPULATE_READ", populate)
    first, last = steps(cold, tmp_path)
    first()
    wait_for(lambda: cached(cold["b"]) > 2**25 - 2**14, "the pages", 60)
    assert cached(cold["a"]) <= 2**22 and cached(cold["c"]) <= 2**22  # huge pages at the ends
    last()
    wait_for(lambda: cached(cold["a"]) > 2**25 - 2**14, "the pages", 60)
    assert cached(cold["c"]) <= 2**22


def test_what_does_not_fit_makes_room(
    cold: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of every token stay as far as they fit into a third of the memory; experts leave after their step."""
    monkeypatch.setattr(mapped_files, "available_memory", lambda: 3 * 2**25 + 2**20)
    first, last = steps(cold, tmp_path)
    first()
    last()
    last.reader.read([cold["c"]])
    wait_for(lambda: all(cached(cold[name]) > 2**25 - 2**22 for name in "abc"), "the pages", 60)
    first()
    wait_for(lambda: cached(cold["c"]) <= 2**22, "the pages", 60)
    last()
    first()
    assert cached(cold["a"]) > 2**25 - 2**22


def steps(tensors: dict[str, torch.Tensor], directory: Path) -> list[Any]:
    """Modules with the weights a and b, which a reader follows; the second one has experts."""
    modules: list[Any] = [torch.nn.Module(), torch.nn.Module()]
    for module, name in zip(modules, "ab", strict=True):
        module.weight = torch.nn.Parameter(tensors[name], requires_grad=False)
        module.forward = lambda: None
    modules[1].reader = None
    reader = mapped_files.Reader(mapped_files.mapped_files(directory))
    reader.follow(torch.nn.ModuleList(modules), [(module, module) for module in modules])
    return modules


def test_pieces_of_tensors(cold: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """In the order of the tensors, cut at whole huge pages; neighbours together; nothing that is in no file."""
    b, c = cold["b"], cold["c"]
    reader = mapped_files.Reader(mapped_files.mapped_files(tmp_path))
    pieces = list(reader.pieces([c, b[:5000], torch.ones(2**23), b[5000 : 2**24], b[2**24 :]]))
    last = max(index for index, (_, end) in enumerate(pieces) if end == c.data_ptr() + 2**25)
    for part, tensor in ((pieces[: last + 1], c), (pieces[last + 1 :], b)):
        assert part[0][0] == tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        assert part[-1][1] == tensor.data_ptr() + 2**25 and 8 <= len(part) <= 9
        assert all(end == start and end % 2**22 == 0 for (_, end), (start, _) in itertools.pairwise(part))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_adds_the_bias(rank: int) -> None:
    """The ranks' results of o_proj are added, and so would be W8A8's bias of each."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.linear import RowParallelLinear

    from glm5_ascend.serve.plugin.linear import W8A8StaticLinear

    layer = RowParallelLinear.__new__(RowParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.tp_rank, bias = rank, torch.tensor([1, 2], dtype=torch.int32)
    layer.weight, layer.deq_scale, layer.input_scale, layer.input_offset = torch.zeros(4, 2, 2).unbind()
    layer.quant_bias = bias
    used = W8A8StaticLinear("o_proj").weights(layer).quant_bias
    assert used is not None and torch.equal(used, (1 - rank) * bias)
