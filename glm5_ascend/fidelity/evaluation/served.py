"""A running server against the reference computed here: NLL and top-1 exactly, KL as a lower bound.

vLLM's `prompt_logprobs: k` gives, for every token of a prompt, its log-probability and those of the k most probable
ids. Of all other ids only the sum is known. With p the reference, known everywhere, and q the server's, the log-sum
inequality bounds their part from below: sum p log(p/q) >= P log(P/Q), P and Q being the two sums:

    KL(p || q) >= sum over the K ids of p log(p/q) + P log(P/Q),

with equality where the two tails have the same shape; a larger k makes the bound tighter. SGLang reports the same at
/generate.
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

#: Most probable ids to ask a server for.
TOP_LOGPROBS = 20
#: Limit of a token id; vocabularies have some 150,000.
_MAX_ID = 2**31
_NEEDED = "give the URL of a vLLM server with /v1/completions, or of an SGLang server with /generate"


@dataclass
class ServedProbabilities:
    """A server's log-probabilities at every predicted position.

    Attributes:
        ids: int64 [T, K]; column 0 is the true next token, the others are the server's most probable ones, repeats
            padded with the true token.
        log_probabilities: fp64 [T, K]; -inf in padding.
        best: int64 [T].
    """

    ids: torch.Tensor
    log_probabilities: torch.Tensor
    best: torch.Tensor


def compare_served(
    client: Client, source: Path, windows: list[torch.Tensor], progress: Progress = silent
) -> FidelityComparison:
    """Compare a server with its reference `source` on `windows`, all of one length.

    Raises:
        MissingEnvironmentError: nothing answers. CheckFailedError: an HTTP error, or NaN or infinity in an answer.
        EvaluationError: the server does not give log-probabilities of prompts.
    """
    sglang = client.is_sglang()
    answers = [request_probabilities(client, window.tolist(), TOP_LOGPROBS, sglang) for window in windows]
    ids = torch.cat([answer.ids for answer in answers])
    served = torch.cat([answer.log_probabilities for answer in answers])
    served_best = torch.cat([answer.best for answer in answers])
    if int(ids.max()) >= load_config(source).vocab_size:
        raise EvaluationError(
            f"{client.url}: answers with token ids that {source} does not have", "serve a model of the same family"
        )
    reference, best = reference_at(source, windows, ids, progress)
    true, shape = ids[:, 0], (len(windows), -1)
    return FidelityComparison(
        lower_bound(reference, served).view(shape), -reference[:, 0].view(shape), -served[:, 0].view(shape),
        (best == served_best).view(shape), (best == true).view(shape), (served_best == true).view(shape),
        kl_is_bound=True,
    )  # fmt: skip


def lower_bound(reference: torch.Tensor, served: torch.Tensor) -> torch.Tensor:
    """Lower bound of KL(reference || served), fp64 [T], from log-probabilities [T, K] of the same ids.

    Columns where `served` is -inf are padding.
    """
    valid = served > -torch.inf
    p = torch.where(valid, reference, -torch.inf).exp()
    inside = torch.where(valid, p * (reference - served), 0.0).sum(1)
    tail_p = (1 - p.sum(1)).clamp_min(0)
    tail_q = (1 - torch.where(valid, served, -torch.inf).exp().sum(1)).clamp_min(1e-12)
    outside = torch.where(tail_p > 0, tail_p * (tail_p.clamp_min(1e-300) / tail_q).log(), 0.0)
    return (inside + outside).clamp_min(0)


def request_probabilities(client: Client, prompt: list[int], k: int, sglang: bool = False) -> ServedProbabilities:
    """Ask for the log-probabilities of a prompt's tokens except the first; by SGLang's own route, or by vLLM's."""
    if sglang:
        entries = _sglang_entries(client, prompt, k)
    else:
        entries = client.complete(prompt, max_tokens=1, prompt_logprobs=k).get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(prompt):
        key = "input_token_logprobs" if sglang else "prompt_logprobs"
        raise EvaluationError(f"{client.url}: no {key} in its answer", _NEEDED)
    ids = torch.tensor(prompt[1:])[:, None].repeat(1, k + 1)
    values = torch.full((len(prompt) - 1, k + 1), -torch.inf, dtype=torch.float64)
    best = torch.empty(len(prompt) - 1, dtype=torch.int64)
    for row, (token, entry) in enumerate(zip(prompt[1:], entries[1:], strict=True)):
        probabilities = _parse_entry(client, row, entry)
        if token not in probabilities or not all(map(math.isfinite, probabilities.values())):
            raise CheckFailedError(
                f"{client.url}: position {row + 1}: NaN, infinity or no log-probability: {shown(entry, 120)}",
                "see the server's log",
            )
        values[row, 0] = probabilities[token]
        others = [other for other in probabilities if other != token][:k]
        for column, other in enumerate(others, start=1):
            ids[row, column], values[row, column] = other, probabilities[other]
        best[row] = min(probabilities, key=lambda id_: (-probabilities[id_], id_))
    return ServedProbabilities(ids, values, best)


def _sglang_entries(client: Client, prompt: list[int], k: int) -> Any:
    """SGLang's answer in vLLM's form, {id: {"logprob": value}} per token; None if the answer has another form."""
    meta = client.prompt_probabilities(prompt, k)
    try:
        tokens, top = meta["input_token_logprobs"], meta["input_top_logprobs"]
        return [
            {} if value is None and not others else {
                str(token): {"logprob": math.nan if logprob is None else logprob}
                for logprob, token, *_ in [*(others or []), (value, token_id)]
            }
            for (value, token_id, *_), others in zip(tokens, top, strict=True)
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None


def _parse_entry(client: Client, row: int, entry: Any) -> dict[int, float]:
    try:
        probabilities = {int(name): float(value["logprob"]) for name, value in entry.items()}
        if all(0 <= token < _MAX_ID for token in probabilities):
            return probabilities
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        pass
    raise EvaluationError(
        f"{client.url}: position {row + 1}: log-probabilities in an unknown form: {shown(entry, 120)}", _NEEDED
    )
