"""Do both models choose the same keys far back? Prompts of any length that ask for what stands in them.

A retrieval prompt is text whose last tokens repeat three passages of it, from near its beginning, its middle and its
end. Inside a repeated passage the next token stands right there: the query needs the key behind its own first
occurrence (an induction head's, arXiv 2209.11895). Counted is how often each model's indexer keeps that key.

Memory: 1 byte x length^2 for each model's choices and once more for the next layer's, and some copies of 64 MiB of
scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from glm5_ascend.errors import EvaluationError, TextError
from glm5_ascend.fidelity.evaluation.compare import Extras, compare
from glm5_ascend.fidelity.evaluation.metrics import Metric, metrics
from glm5_ascend.fidelity.evaluation.walk import Walk
from glm5_ascend.fidelity.evaluation.windows import read_windows
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.quantize.progress import Progress, silent

#: Tokens of a passage, and where passages begin, as shares of the text.
PASSAGE, DEPTHS = 64, (0.1, 0.5, 0.9)
TAIL = PASSAGE * len(DEPTHS)


@dataclass(frozen=True)
class RetrievalPrompt:
    """tokens: int64 [length]. queries: positions whose next token stands in the text. needles: where it stands."""

    tokens: torch.Tensor
    queries: torch.Tensor
    needles: torch.Tensor

    @classmethod
    def of(cls, text: torch.Tensor) -> RetrievalPrompt:
        """Made of a text int64 [length], whose last `TAIL` tokens are replaced."""
        body = text[: len(text) - TAIL]
        starts = torch.tensor([int(depth * (len(body) - PASSAGE)) for depth in DEPTHS])
        within = torch.arange(PASSAGE)
        tokens = torch.cat([body, body[(starts[:, None] + within).flatten()]])
        places = len(body) + PASSAGE * torch.arange(len(DEPTHS))[:, None] + within[:-1]
        return cls(tokens, places.flatten(), (starts[:, None] + within[1:]).flatten())

    def asked(self, values: torch.Tensor) -> torch.Tensor:
        """Of values [1, length - 1] those at the queries."""
        return values[:, self.queries]


@dataclass
class _Needles:
    """Gathers, over the layers with an indexer of their own, which needles each model keeps."""

    prompt: RetrievalPrompt
    reference: list[torch.Tensor] = field(default_factory=list)
    both: list[torch.Tensor] = field(default_factory=list)

    def look(self, layer: int, walks: tuple[Walk, Walk]) -> None:
        if walks[0].model.config.has_indexer(layer):
            a, b = (self._kept(walk) for walk in walks)
            self.reference.append(a)
            self.both.append(a & b)

    def _kept(self, walk: Walk) -> torch.Tensor:
        (selected,) = walk.selections
        assert selected is not None
        return selected[self.prompt.queries, self.prompt.needles]

    def rows(self) -> list[Metric]:
        kept, both = torch.stack(self.reference).double(), torch.stack(self.both).double()
        share = float(both.sum() / kept.sum().clamp_min(1))
        rows = [Metric("needles_source", "needed keys that the reference chooses", float(kept.mean()), None, True)]
        return rows + ([Metric("needles_kept", "of these, this chooses too", share, None, True)] if kept.any() else [])


def retrieval_prompts(
    against: Path, config: ModelConfig, text: Path | None, default: Iterable[str], lengths: Sequence[int]
) -> dict[int, RetrievalPrompt]:
    """A prompt of each length for the model in `against`, of this config: a wrong length is told before any work.

    Raises:
        EvaluationError: a length at which every key is kept. TextError: too little text, or too few positions.
    """
    found, default = {}, list(default)
    for length in lengths:
        if length - TAIL <= config.index_topk:
            raise EvaluationError(
                f"--lengths {length}: the indexer keeps {config.index_topk} keys, there must be more to choose from",
                f"give lengths above {config.index_topk + TAIL}",
            )
        try:
            (window,) = read_windows(text, default, against, config, length, 1)
        except TextError as error:
            raise TextError(
                error.message.replace("--window", "--lengths"), "give more text with --text, or smaller --lengths"
            ) from None
        found[length] = RetrievalPrompt.of(window)
    return found


def long_contexts(
    this: Path, against: Path, prompts: Mapping[int, RetrievalPrompt], progress: Progress = silent
) -> dict[str, list[Metric]]:
    """Figures of one retrieval prompt of each length: KL and NLL where the passages repeat, keys, needed keys."""
    found = {}
    for length, prompt in prompts.items():
        needles = _Needles(prompt)
        compared = compare(this, against, [prompt.tokens], progress, Extras(observe=needles.look))
        found[f"{length} tokens"] = [*metrics(compared.at(prompt.asked)), *needles.rows()]
    return found
