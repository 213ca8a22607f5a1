"""The rotation that goes with the MTP layer: `rot.weight`, the global rotation, and the keys that switch them on."""

from __future__ import annotations

from random import Random

import torch
from safetensors.torch import load_file, save_file

from tests.verify.mutations.mutator import Place, kind, pick, place
from tests.verify.support.editor import DESCRIPTION, QUAROT, ROT, Checkpoint

GLOBAL = "global_rotation"


def rotated(ck: Checkpoint) -> list[str]:
    return ck.names(r"^rot\.weight$")


def q_of(ck: Checkpoint) -> torch.Tensor:
    return load_file(ck.directory / QUAROT)[GLOBAL]


@kind()
def rot_wrong(ck: Checkpoint, chance: Random) -> str:
    """Turned, of a permuted basis, without its rotation, with rows of another, empty, or Q itself."""
    rot = ck.read(pick(chance, rotated(ck))).float()
    size, q = len(rot), q_of(ck)
    by = chance.randrange(1, size, 2)  # by half the size it would commute with a Hadamard matrix
    rows = torch.tensor(chance.sample(range(size), size))
    gain = torch.linspace(0.5, 1.5, size)
    noise = torch.randn(size, size, generator=torch.Generator().manual_seed(chance.randrange(2**31)))
    wrong = [
        rot.roll(by, 0), rot.roll(by, 1), rot[rows][:, rows], torch.diag(gain), q @ rot @ q.T, torch.zeros_like(rot),
        q, rot @ q, q @ (gain[:, None] * q.T), noise + noise.T, rot * (1 + gain),
    ]  # fmt: skip
    ck.store({ROT: pick(chance, wrong).to(ck.read(ROT).dtype)})
    return ROT


@kind()
def rot_missing(ck: Checkpoint, chance: Random) -> str:
    ck.store(dict.fromkeys([name := pick(chance, rotated(ck))]))
    return name


@kind()
def rot_in_a_shard(ck: Checkpoint, chance: Random) -> str:
    """Loaded by the index; SGLang asks for a file of its own by name."""
    rot = ck.read(pick(chance, rotated(ck)))
    shard = pick(chance, [file for file in ck.shards if file != "rot.safetensors"])
    ck.store({ROT: None})
    ck.store({ROT: rot}, shard)
    return ROT


@kind()
def rot_in_an_unrotated_model(ck: Checkpoint, chance: Random) -> Place:
    """`is_rot_used`, or the tensor, or both, where nothing was rotated."""
    pick(chance, [] if rotated(ck) else [ROT])
    hidden = ck.config["hidden_size"]
    which = chance.randrange(2)
    if which:
        ck.store({ROT: torch.eye(hidden).bfloat16()})
    else:
        with ck.json(DESCRIPTION) as description:
            description["is_rot_used"] = True
    return place([ROT])


@kind()
def global_rotation_wrong(ck: Checkpoint, chance: Random) -> Place:
    """Not orthogonal, of another basis, of a foreign type or shape, NaN."""
    pick(chance, rotated(ck))
    q = q_of(ck)
    size, row, by = len(q), chance.randrange(len(q)), chance.randrange(1, len(q))
    one = q.clone()
    one[row] = pick(chance, [0.0, float("nan"), float("inf"), 1.0])
    wrong = [one, q * 1.01, q[:, torch.tensor(chance.sample(range(size), size))], q.T, q.roll(by, 1), q.bfloat16(),
             q.double(), q[:-1], q[None], torch.eye(size)]  # fmt: skip
    save_file({pick(chance, [GLOBAL, GLOBAL, GLOBAL, "Q"]): pick(chance, wrong).contiguous()}, ck.directory / QUAROT)
    return place([GLOBAL, QUAROT, ROT])


@kind()
def global_rotation_elsewhere(ck: Checkpoint, chance: Random) -> Place:
    """The description names another file, or no file at all."""
    pick(chance, rotated(ck))
    paths = ["optional/other.safetensors", "", ".", "optional", "../quarot.safetensors", "/etc/passwd", None, 7, "a\0b"]
    paths.append(ck.shards[0])
    with ck.json(DESCRIPTION) as description:
        description["optional"] = {"quarot": {"rotation_map": {GLOBAL: pick(chance, paths)}}}
    return place([GLOBAL], [DESCRIPTION, *ck.shards])
