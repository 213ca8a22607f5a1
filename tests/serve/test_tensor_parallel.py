"""Two ranks of tensor parallel, each a process with its part of the weights, give the answers of one."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest
import torch

from glm5_ascend.errors import ConfigError
from glm5_ascend.serve.limits import require_even_split
from glm5_ascend.serve.local_server import free_port
from tests.support.server_process import running
from tests.support.tiny_model import tiny_config

DRAFTS = {"method": "mtp", "num_speculative_tokens": 3}
#: Difference of the two best log-probabilities below which the ranks' noise may choose the other token.
NEAR_TIE = 0.25


@pytest.mark.parametrize(
    ("ranks", "change", "message"),
    [
        (1, {"moe_intermediate_size": 33}, ""),
        (2, {}, ""),
        (4, {}, "num_attention_heads 2 of config.json does not divide into 4 equal parts"),
        (2, {"intermediate_size": 65}, "intermediate_size 65 of"),
        (2, {"moe_intermediate_size": 34}, "moe_intermediate_size 34 of config.json .* 2 equal parts of an even size"),
    ],
)
def test_what_must_divide(ranks: int, change: dict[str, Any], message: str) -> None:
    config = tiny_config(**change)
    if not message:
        require_even_split(config, ranks)
        return
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {ranks}: {message}"):
        require_even_split(config, ranks)


@pytest.mark.server
@pytest.mark.long
def test_logits(float_checkpoint: Path, run_engine: Any, prompts: list[list[int]]) -> None:
    """In fp32 only the order of additions differs."""
    engine = {"model": str(float_checkpoint), "dtype": "float32", "max_logprobs": -1}
    one, two = (
        torch.tensor(run_engine(engine=engine | {"tensor_parallel_size": n}, score=prompts[2:3])["scores"][0]).double()
        for n in (1, 2)
    )
    kl = (one.exp() * (one - two)).sum(-1)
    assert float(kl.mean()) < 1e-6


@pytest.mark.server
@pytest.mark.long
def test_greedy_answers_and_the_end_of_all_processes(rotated_checkpoint: Path, run_engine: Any, tmp_path: Path) -> None:
    """The trained model with drafts; then one rank is killed while the other waits for it in compiled code."""
    from transformers import AutoTokenizer

    from benchmarks.training.evaluate import prompts_of
    from benchmarks.training.held_out import held_out_questions

    tokenizer = AutoTokenizer.from_pretrained(rotated_checkpoint, trust_remote_code=False)
    prompts = prompts_of(tokenizer, held_out_questions(seed=5, n=28))
    engine = {"model": str(rotated_checkpoint), "quantization": "ascend", "speculative_config": DRAFTS}
    one = run_engine(engine=engine, batches=[prompts], new_tokens=48, ends=True)["batches"][0]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "glm5_ascend", "serve", str(rotated_checkpoint), "--port", str(port)]
    command += ["--skip-verify", "--log", str(tmp_path / "log"), "--", "--tensor-parallel-size", "2"]
    command += ["--speculative-config", json.dumps(DRAFTS)]
    with running(command, port, tmp_path / "out") as process:
        family = psutil.Process(process.pid).children(recursive=True)
        request = {"prompt": prompts, "max_tokens": 48, "temperature": 0, "logprobs": 0, "return_token_ids": True}
        two = sorted(json.loads(post(url, request))["choices"], key=lambda choice: choice["index"])
        assert 'spec_decode_num_accepted_tokens_total{engine="0"' in urlopen(f"{url}/metrics").read().decode()
        ranks = [member for member in family if "Worker_TP" in member.name()]
        ranks.sort(key=psutil.Process.create_time)  # numbers of processes start again after the largest
        assert len(ranks) == 2
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(post, url, {"prompt": "1 2 3", "max_tokens": 1500, "ignore_eos": True})
            time.sleep(1)
            ranks[1].kill()
            assert isinstance(asked.exception(), OSError)
        assert process.wait(timeout=300) == 3
        assert not psutil.wait_procs(family, timeout=10)[1]
    ready, error, _ = (tmp_path / "out").read_text().splitlines()[-3:]
    assert "  2 x 1 thread, cache 2 x 1.1 GB, context 2048  " in ready
    assert error.startswith("error: the server ended with exit code 0: VllmWorker-1 died, ")
    require_equal_answers(one, two)


def require_equal_answers(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    """Require equal tokens where one rank's choice is no near tie.

    The ranks' scales move a log-probability by up to 0.06, and logits in bf16 are multiples of 0.06 or 0.12.
    """
    certain = [(a, b) for a, b in zip(one, two, strict=True) if min(a["gaps"]) > NEAR_TIE]
    assert len(certain) >= 0.8 * len(one)
    assert [a["tokens"] for a, _ in certain] == [b["token_ids"] for _, b in certain]
    apart = torch.cat(
        [torch.tensor(a["logprobs"]) - torch.tensor(b["logprobs"]["token_logprobs"]) for a, b in certain]
    ).abs()
    print(f"two ranks: log-probabilities differ by {float(apart.mean()):.2g}, at most {float(apart.max()):.2g}")
    assert float(apart.mean()) < 0.01 and float(apart.max()) < NEAR_TIE


def post(url: str, request: dict[str, Any]) -> bytes:
    """The server's answer to a completion request."""
    body = json.dumps({"model": "glm-5"} | request).encode()
    with urlopen(Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})) as answer:
        return bytes(answer.read())
