"""A running server against the reference computed here: NLL and top-1 exactly, KL from below.

vLLM's `prompt_logprobs: k` gives, for every token of a prompt, its log-probability and those of the k most probable
ids. What is outside of these K ids is known as a sum only. With p the reference, known everywhere, and q the server's,
the log-sum inequality bounds that part from below: sum p log(p/q) >= P log(P/Q), P and Q being what both leave outside:

    KL(p || q) >= sum over the K ids of p log(p/q) + P log(P/Q),

with equality where the two tails have the same shape; a larger k closes the gap. SGLang says the same at /generate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.errors import CheckFailedError, EvaluationError, shown
from glm5_ascend.fidelity.evaluation.compare import FidelityComparison, reference_at
from glm5_ascend.model.config_file import load_config
from glm5_ascend.quantize.progress import Progress, silent
from glm5_ascend.serve.client import Client

#: Of a token; vocabularies have some 150,000.
_LARGEST_ID = 2**31


@dataclass
class Answers:
    """What a server says of every predicted position.

    Attributes:
        ids: int64 [T, K]; column 0 is the true next token, the others the server's most probable ones, repeats padded
            with the true token.
        log_probabilities: fp64 [T, K]; -inf in padding.
        best: int64 [T].
    """

    ids: torch.Tensor
    log_probabilities: torch.Tensor
    best: torch.Tensor


def compare_served(
    client: Client, against: Path, windows: list[torch.Tensor], k: int, progress: Progress = silent
) -> FidelityComparison:
    """The server behind `client` against `against` on `windows`, all of one length.

    Raises:
        MissingEnvironmentError: nothing answers. CheckFailedError: an HTTP error, or NaN or infinity in an answer.
        EvaluationError: the server does not give log-probabilities of prompts.
    """
    sglang = client.is_sglang()
    pieces = [ask(client, window.tolist(), k, sglang) for window in windows]
    answers = Answers(
        torch.cat([piece.ids for piece in pieces]),
        torch.cat([piece.log_probabilities for piece in pieces]),
        torch.cat([piece.best for piece in pieces]),
    )
    if int(answers.ids.max()) >= load_config(against).vocab_size:
        raise EvaluationError(
            f"{client.url}: answers with token ids that {against} does not have", "serve a model of the same family"
        )
    reference = reference_at(against, windows, answers.ids, progress)
    kl = lower_bound(reference.log_probabilities, answers.log_probabilities)
    true, shape = answers.ids[:, 0], (len(windows), -1)
    return FidelityComparison(
        kl.view(shape), -reference.log_probabilities[:, 0].view(shape), -answers.log_probabilities[:, 0].view(shape),
        (reference.best == answers.best).view(shape), (reference.best == true).view(shape),
        (answers.best == true).view(shape), kl_is_bound=True,
    )  # fmt: skip


def lower_bound(reference: torch.Tensor, served: torch.Tensor) -> torch.Tensor:
    """Lower bound of KL(reference || served), fp64 [T], from log-probabilities [T, K] of the same ids.

    Columns where `served` is -inf are padding.
    """
    known = served > -torch.inf
    p = torch.where(known, reference, -torch.inf).exp()
    inside = torch.where(known, p * (reference - served), 0.0).sum(1)
    tail_p = (1 - p.sum(1)).clamp_min(0)
    tail_q = (1 - torch.where(known, served, -torch.inf).exp().sum(1)).clamp_min(1e-12)
    outside = torch.where(tail_p > 0, tail_p * (tail_p.clamp_min(1e-300) / tail_q).log(), 0.0)
    return (inside + outside).clamp_min(0)


def ask(client: Client, prompt: list[int], k: int, sglang: bool = False) -> Answers:
    """The log-probabilities of one prompt's tokens but the first; `sglang`: by its own route, not by vLLM's."""
    entries = _of_sglang(client, prompt, k) if sglang else _of_vllm(client, prompt, k)
    if not isinstance(entries, list) or len(entries) != len(prompt):
        raise EvaluationError(
            f"{client.url}: no {'input_token_logprobs' if sglang else 'prompt_logprobs'} in its answer",
            "give the URL of a vLLM server with /v1/completions, or of an SGLang server with /generate",
        )
    ids = torch.tensor(prompt[1:])[:, None].repeat(1, k + 1)
    values = torch.full((len(prompt) - 1, k + 1), -torch.inf, dtype=torch.float64)
    best = torch.empty(len(prompt) - 1, dtype=torch.int64)
    for row, (token, entry) in enumerate(zip(prompt[1:], entries[1:], strict=True)):
        found = _probabilities(client, row, entry)
        if token not in found or not all(torch.isfinite(torch.tensor([value for value, _ in found.values()]))):
            raise CheckFailedError(
                f"{client.url}: position {row + 1}: NaN, infinity or no log-probability: {shown(entry, 120)}",
                "see the server's log",
            )
        values[row, 0] = found[token][0]
        others = [each for each in found if each != token][:k]
        for column, each in enumerate(others, start=1):
            ids[row, column], values[row, column] = each, found[each][0]
        best[row] = min(found, key=lambda each: (-found[each][0], each))
    return Answers(ids, values, best)


def _of_vllm(client: Client, prompt: list[int], k: int) -> Any:
    return client.complete(prompt, max_tokens=1, prompt_logprobs=k).get("prompt_logprobs")


def _of_sglang(client: Client, prompt: list[int], k: int) -> Any:
    """In vLLM's form: of each token {id: {"logprob": value}}; None where the form is another one."""
    told = client.prompt_probabilities(prompt, k)
    try:
        own, best = told["input_token_logprobs"], told["input_top_logprobs"]
        return [
            {} if value is None and not others else {
                str(token): {"logprob": math.nan if found is None else found}
                for found, token, *_ in [*(others or []), (value, own_id)]
            }
            for (value, own_id, *_), others in zip(own, best, strict=True)
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None


def _probabilities(client: Client, row: int, entry: Any) -> dict[int, tuple[float, Any]]:
    """Log-probability and rank by token id, of one position."""
    try:
        found = {int(name): (float(each["logprob"]), each.get("rank")) for name, each in entry.items()}
        if all(0 <= token < _LARGEST_ID for token in found):
            return found
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        pass
    raise EvaluationError(
        f"{client.url}: position {row + 1}: log-probabilities in an unknown form: {shown(entry, 120)}",
        "give the URL of a vLLM server with /v1/completions, or of an SGLang server with /generate",
    )
