"""Do both models select the same keys far back? Retrieval prompts of any length.

A retrieval prompt is text whose last tokens repeat three passages of it, from near its beginning, its middle and its
end. Inside a repeated passage the next token stands in the prompt: the query needs the key after its own first
occurrence (an induction head's, arXiv 2209.11895). Counted is how often each model's indexer selects that key.

Memory: 1 byte x length^2 for each model's selections and once more for the next layer's, and some copies of 64 MiB of
scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from glm5_ascend.errors import EvaluationError, TextError
from glm5_ascend.fidelity.evaluation.compare import compare
from glm5_ascend.fidelity.evaluation.metrics import SHARE, Metric, metrics
from glm5_ascend.fidelity.evaluation.stored_model import Walk
from glm5_ascend.fidelity.evaluation.windows import read_windows
from glm5_ascend.model.config_file import load_config
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
    def from_text(cls, text: torch.Tensor) -> RetrievalPrompt:
        """Replace the last `TAIL` tokens of a text int64 [length] by the passages."""
        body = text[: len(text) - TAIL]
        starts = torch.tensor([int(depth * (len(body) - PASSAGE)) for depth in DEPTHS])
        offsets = torch.arange(PASSAGE)
        tokens = torch.cat([body, body[(starts[:, None] + offsets).flatten()]])
        queries = len(body) + PASSAGE * torch.arange(len(DEPTHS))[:, None] + offsets[:-1]
        return cls(tokens, queries.flatten(), (starts[:, None] + offsets[1:]).flatten())

    def at_queries(self, values: torch.Tensor) -> torch.Tensor:
        """Values [1, length - 1] -> those of the queries."""
        return values[:, self.queries]


@dataclass
class _NeedleCounter:
    prompt: RetrievalPrompt
    reference: list[torch.Tensor] = field(default_factory=list)
    both: list[torch.Tensor] = field(default_factory=list)

    def observe(self, layer: int, walks: tuple[Walk, Walk]) -> None:
        if walks[0].model.config.has_indexer(layer):
            a, b = (self._selected(walk) for walk in walks)
            self.reference.append(a)
            self.both.append(a & b)

    def _selected(self, walk: Walk) -> torch.Tensor:
        (selection,) = walk.selections
        assert selection is not None
        return selection[self.prompt.queries, self.prompt.needles]

    def rows(self) -> list[Metric]:
        reference, both = torch.stack(self.reference).double(), torch.stack(self.both).double()
        rows = [Metric("needles_source", "needed keys, reference", float(reference.mean()), format=SHARE)]
        if reference.any():
            share = float(both.sum() / reference.sum())
            rows.append(Metric("needles_kept", "needed keys, share selected by quantized too", share, format=SHARE))
        return rows


def retrieval_prompts(source: Path, text: Path | None, lengths: Sequence[int]) -> dict[int, RetrievalPrompt]:
    """A prompt of each length for the model in `source`; wrong lengths are refused before any work.

    Raises:
        EvaluationError: a length at which every key is selected. TextError: too little text, or too few positions.
    """
    prompts, topk = {}, load_config(source).index_topk
    for length in lengths:
        if length - TAIL <= topk:
            raise EvaluationError(
                f"--lengths {length}: the indexer keeps {topk} keys, there must be more to choose from",
                f"give lengths above {topk + TAIL}",
            )
        try:
            (window,) = read_windows(text, source, length, 1)
        except TextError as error:
            message = error.message.replace("--window", "--lengths")
            raise TextError(message, "give more text with --text, or smaller --lengths") from None
        prompts[length] = RetrievalPrompt.from_text(window)
    return prompts


def compare_long_contexts(
    quantized: Path, source: Path, prompts: Mapping[int, RetrievalPrompt], progress: Progress = silent
) -> dict[str, list[Metric]]:
    """Figures of the retrieval prompt of each length: KL and NLL in the repeated passages, keys, needed keys."""
    figures = {}
    for length, prompt in prompts.items():
        counter = _NeedleCounter(prompt)
        comparison = compare(quantized, source, [prompt.tokens], progress, observe=counter.observe)
        figures[f"{length} tokens"] = [*metrics(comparison.map_positions(prompt.at_queries)), *counter.rows()]
    return figures
