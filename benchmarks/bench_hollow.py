"""Serve all layers and the MTP layer of GLM-5 in W4A8, 418 GB of zeros, with 20 GB of memory; check the answers.

    python benchmarks/bench_hollow.py work/hollow [--family glm-5.3-flash] [--memory 20] [--tokens 16] [--prompt 4096]

Makes the checkpoint (tools/make_model.py, half a GB of disk) and a control group with so many GB of memory (as root).
In it `glm5-ascend serve` answers over HTTP without and with MTP, then Ctrl-C ends it. Printed: anonymous memory of all
processes (the largest of five looks a second), seconds per token and where they go. The file has no blocks on the disk,
Linux fills pages with zeros instead: this is no disk's speed. Checked: every greedy token is the one that the file's
embedding and head give, MTP changes none and all its drafts are accepted, a drawn answer and a long prompt are
answered, anonymous memory stays below what the memory line said, exit code 130 and no process afterwards. Exit code 1
if a check fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from tools.limited_server import FailedError, ask, control_group, require, serving
from tools.make_model import TOKENS

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.model.config_file import load_config
from glm5_ascend.serve.client import Client

MAKE_MODEL = Path(__file__).parent / "tools/make_model.py"
#: Of more than one token: vLLM's MTP layer takes zeros for the embedding at position 0, so a draft there is wrong.
PROMPT = "Hello?"
RECIPES = {"glm-5": "w4a8", "glm-5.3-flash": "flash-w4a8"}
MTP = ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1})]


class Expected:
    """The greedy answer, from the embedding and the head alone: all layers between them add zeros."""

    def __init__(self, model: Path) -> None:
        checkpoint = CheckpointDir(model)
        spec = load_config(model).spec
        self.tables = [
            shard.read_span(entry, 0, TOKENS * entry.shape[1]).view(TOKENS, -1).float()
            for name in (f"{spec.embedding}.weight", f"{spec.head}.weight")
            for shard, entry in [(checkpoint.shards[checkpoint.file_of[name]], checkpoint.entries[name])]
        ]

    def check(self, last: int, ids: list[int], what: str) -> None:
        """Raise `FailedError` unless each id follows the one before; the first follows `last`."""
        embedding, head = self.tables
        for token in ids:
            x = embedding[last]
            logits = head @ (x * torch.rsqrt(x.square().mean() + 1e-5))
            require(float(logits[token]) > float(logits.max()) - 0.1, f"{what}: token {token} after {last}")
            last = token


def run(work: Path, family: str, memory: float, tokens: int, prompt: int, only: str, layers: int | None) -> None:
    model = work / f"{family}-w4a8{f'-{layers}' if layers else ''}"
    if not model.exists():
        sizes = ["--layers", str(layers)] if layers else []
        command = [sys.executable, str(MAKE_MODEL), str(model), "--recipe", RECIPES[family], "--family", family, *sizes]
        subprocess.run(command, check=True)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    blocks = sum(512 * path.stat().st_blocks for path in model.glob("*.safetensors"))
    print(f"{model.name}: {size / 1e9:.1f} GB, on the disk {blocks / 1e9:.2f} GB; memory {memory} GB", flush=True)
    expected, answers = Expected(model), []
    with control_group(int(memory * 1e9)) as members:
        for name, flags in (("MTP off", []), ("MTP on", MTP)):
            if only not in name:
                continue
            with serving(model, members, flags) as server:
                require("read from disk" in server.ready, "the ready line does not say where from")
                # With a draft a step gives two tokens, and an odd number ends with a step.
                ids = ask(server, PROMPT, tokens | 1 if flags else tokens, name)
                expected.check(3 + sorted(ByteLevel.alphabet()).index(PROMPT[-1]), ids, name)
                answers.append(ids[:tokens])
                if flags:
                    counts = Client(server.url).metrics()
                    right = counts["vllm:spec_decode_num_accepted_tokens_total"]
                    proposed = counts["vllm:spec_decode_num_draft_tokens_total"]
                    print(f"  drafts accepted: {right:.0f} of {proposed:.0f}")
                    require(right == proposed == tokens // 2, "a draft was not accepted")
                else:
                    ask(server, PROMPT, 1, "temperature 1", temperature=1.0)
                if prompt and not flags:
                    long = [3 + i * 7 % 256 for i in range(prompt)]
                    expected.check(long[-1], ask(server, long, 1, f"prompt of {prompt} tokens"), "the long prompt")
            said = server.predicted()
            require(server.anonymous < said, f"anonymous memory is not below the {said / 1e9:.1f} GB that serve said")
    require(answers[0] == answers[-1], "MTP changes the answer")
    print("ok: all checks passed")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="folder for the checkpoint")
    parser.add_argument("--family", choices=sorted(RECIPES), default="glm-5")
    parser.add_argument("--memory", type=float, default=20, help="GB of the control group")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the long prompt; 0: none")
    parser.add_argument("--only", choices=("MTP on", "MTP off"), default="", help="one of the two servers")
    parser.add_argument("--layers", type=int, help="fewer than the family has, beside the MTP layer")
    args = parser.parse_args()
    try:
        run(args.work, args.family, args.memory, args.tokens, args.prompt, args.only, args.layers)
    except FailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
