"""Steps of few tokens without their Python code: recorded once, then repeated on the recorded step's tensors.

A step of one token runs some hundred short calls in each layer, and the Python code between them takes as long as the
weights of a layer on a large server. This is what a graph is on a device; here the calls are those of compiled code and
of torch's operators (`glm5_kernels.compiled.recording`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger

from glm5_ascend.serve.plugin.backend import SparseMLAMetadata
from glm5_kernels import ops

#: Tokens of a step, at most: more take so long that the rest is small. Recordings of a process: each keeps the results
#: of all layers, about half a MB per token and layer.
MOST_TOKENS, MOST_RECORDINGS = 4, 8
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
logger = init_logger(f"vllm.{__name__}")


class RecordedSteps:
    """Runs a model's `forward`(input_ids [T], positions [T]) -> hidden states, repeating what it has recorded.

    Attributes:
        topk: positions that a layer selects; a step whose requests are longer makes other calls.
    """

    def __init__(self, forward: Forward, topk: int) -> None:
        self._forward, self.topk = forward, topk
        self._steps: dict[Any, _Step | None] = {}

    @property
    def uses(self) -> dict[Any, int]:
        """Return how often each kind of step was repeated; 0 for a kind that cannot be."""
        return {kind: 0 if step is None else step.uses for kind, step in self._steps.items()}

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The hidden states [T, hidden_size] of the step."""
        metadata = get_forward_context().attn_metadata
        if not _is_recordable(metadata, len(input_ids)):
            return self._forward(input_ids, positions)
        distinct = list({id(one): one for one in metadata.values()}.values())
        tensors = [input_ids, positions, *(tensor for one in distinct for tensor in _tensors(one))]
        kind = tuple(tensor.shape for tensor in tensors), tuple(one.longest <= self.topk for one in distinct)
        if kind in self._steps:
            return self._repeated(kind, tensors)
        if len(self._steps) == MOST_RECORDINGS:
            return self._forward(input_ids, positions)
        self._steps[kind] = step = _Step()
        hidden = step.record(self._forward, metadata, tensors)
        if step.recording.obstacle:
            self._give_up(kind, step.recording.obstacle)
        return hidden

    def _repeated(self, kind: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
        step = self._steps[kind]
        if step is None:
            return self._forward(*tensors[:2])
        try:
            hidden = step.repeat(tensors)
        except ops.NotRecordableError as error:
            self._give_up(kind, str(error))
            return self._forward(*tensors[:2])
        if not step.is_checked_now():
            return hidden
        expected = self._forward(*tensors[:2])
        if not torch.equal(hidden.view(torch.int8), expected.view(torch.int8)):
            self._give_up(kind, "a repeated step differs from the model")
        return expected

    def _give_up(self, kind: Any, reason: str) -> None:
        logger.warning("steps of %d tokens run as Python again: %s", kind[0][0][0], reason)
        self._steps[kind] = None


class _Step:
    """A recorded step: the tensors that it reads, and its hidden states."""

    def __init__(self) -> None:
        self.recording, self.uses = ops.new_recording(), 0

    def record(self, forward: Forward, metadata: dict[str, Any], tensors: list[torch.Tensor]) -> torch.Tensor:
        """Run the step on copies of its inputs."""
        context, copies = get_forward_context(), dict[int, SparseMLAMetadata]()
        self.inputs = [tensor.clone() for tensor in tensors]
        rest = iter(self.inputs[2:])
        for one in metadata.values():
            if id(one) not in copies:
                copies[id(one)] = SparseMLAMetadata(one.num_actual_tokens, *(next(rest) for _ in _tensors(one)))
                copies[id(one)].longest = one.longest  # a number that the recording must not read
        context.attn_metadata = {name: copies[id(one)] for name, one in metadata.items()}
        try:
            with self.recording:
                self.hidden = forward(*self.inputs[:2])
        finally:
            context.attn_metadata = metadata
        return self.hidden.clone()

    def repeat(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Run the recorded calls on new inputs."""
        self.uses += 1
        for target, tensor in zip(self.inputs, tensors, strict=True):
            target.copy_(tensor)
        self.recording.repeat()
        return self.hidden.clone()

    def is_checked_now(self) -> bool:
        """True for uses 1, 2, 4, 8, ...: a call that the recording lacks would show later, if not at once."""
        return self.uses & (self.uses - 1) == 0


def _is_recordable(metadata: Any, tokens: int) -> bool:
    """True for a step of few tokens without padding; the profiling run has no metadata."""
    if not isinstance(metadata, dict) or not 0 < tokens <= MOST_TOKENS:
        return False
    return all(isinstance(one, SparseMLAMetadata) and one.num_actual_tokens == tokens for one in metadata.values())


def _tensors(metadata: SparseMLAMetadata) -> Iterator[torch.Tensor]:
    yield from (metadata.query_start_loc, metadata.seq_lens, metadata.block_table, metadata.slot_mapping)
