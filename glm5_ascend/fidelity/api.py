"""`evaluate()` and `analyze()`: what the commands `eval` and `analyze` call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glm5_ascend.errors import ConfigError, EvaluationError
from glm5_ascend.fidelity.analysis import html as analysis_html
from glm5_ascend.fidelity.analysis import recipe as recipes
from glm5_ascend.fidelity.analysis import run, summary
from glm5_ascend.fidelity.analysis.budget import Fallback, final_types, propose, wide_caches
from glm5_ascend.fidelity.evaluation import html as evaluation_html
from glm5_ascend.fidelity.evaluation.compare import Extras, FidelityComparison, compare
from glm5_ascend.fidelity.evaluation.generation import generate, generation_metrics, metrics_by_task, read_prompts
from glm5_ascend.fidelity.evaluation.long_context import long_contexts, retrieval_prompts
from glm5_ascend.fidelity.evaluation.metrics import Metric, chosen_groups
from glm5_ascend.fidelity.evaluation.metrics import metrics as figures
from glm5_ascend.fidelity.evaluation.python_docs import documents
from glm5_ascend.fidelity.evaluation.served import compare_served
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_ascend.fidelity.evaluation.summary import Summary
from glm5_ascend.fidelity.evaluation.windows import read_tasks
from glm5_ascend.quantize.progress import Progress, silent
from glm5_ascend.quantize.sizes import parse_size
from glm5_ascend.report import page
from glm5_ascend.report.verdict import FEW_WINDOWS
from glm5_ascend.serve.client import Client, server_address

ANSWER_TIMEOUT_S = 600.0
#: Defaults of `evaluate`, and tokens and windows of a quick one: as few windows as a 95 % interval takes.
WINDOW, WINDOWS = 512, 64
QUICK_WINDOW, QUICK_WINDOWS = 128, int(FEW_WINDOWS.value)


def evaluate(
    directory: str | Path | None = None,
    *,
    against: str | Path | None = None,
    text: str | Path | None = None,
    window: int = WINDOW,
    windows: int = WINDOWS,
    quick: bool = False,
    metrics: str | None = None,
    lengths: str | Sequence[int] | None = None,
    url: str | None = None,
    top_logprobs: int = 20,
    prompts: str | Path | None = None,
    against_url: str | None = None,
    max_tokens: int = 256,
    model: str = "",
    key: str = "",
    html: str | Path | None = None,
    progress: Progress = silent,
) -> Summary:
    """KL, top-1, flips, NLL, routing and answers of a quantized checkpoint or server against its source.

    Args:
        directory: quantized checkpoint; None where `url` serves it.
        against: its source, the reference.
        text: held-out text, .txt or .jsonl, whose records may name a "task" each; None takes Python's documentation.
        window, windows: tokens per window, and at most so many windows.
        quick: windows of 128 tokens, 20 of them; on a large model reading the weights takes most of what is left.
        metrics: only these, comma-separated: kl, top1, flips, nll, routing, indexer, mtp.
        lengths: of retrieval prompts in tokens, such as "4096,16384" or [4096]; with `directory` only.
        url, against_url: running vLLM servers of the two models, http://HOST:PORT.
        top_logprobs: log-probabilities to ask a server for.
        prompts: JSONL file of prompts that both servers answer, in at most `max_tokens` tokens.
        model, key: the servers' name for the model ("" is their first), and their API key.
        html: file to write a report to.
        progress: progress(text, done, total) in layers.
    Raises:
        EvaluationError: arguments or models that cannot be compared. CheckFailedError: NaN or infinity.
        MissingEnvironmentError: a server does not answer.
    """
    paths = _Compared(_path(directory), _path(against), url, _path(prompts), against_url)
    groups = chosen_groups(metrics)
    paths.check()
    if quick:
        if (window, windows) != (WINDOW, WINDOWS):
            raise EvaluationError("--quick has its own windows", "leave out --window and --windows, or --quick")
        window, windows = QUICK_WINDOW, QUICK_WINDOWS
    far = _lengths(lengths)
    if far and paths.directory is None:
        raise EvaluationError("--lengths looks into a checkpoint: a server does not show its keys", "give DIR")
    if html is not None:
        page.check_place(Path(html))
    asked = read_prompts(paths.prompts) if paths.prompts is not None else []
    servers = [_client(address, model, key) for address in (url, against_url) if address is not None]
    found = Summary(url or str(directory), str(against or against_url))
    bundled = list(documents(held_out=True)) if paths.against is not None and text is None else []
    if paths.against is not None:
        job = _TextJob(_path(text), bundled, window, windows, far, groups, top_logprobs, progress)
        _evaluate_text(found, job, paths, servers)
    if asked:
        this, reference = (generate(server, asked, max_tokens) for server in servers)
        found.prompts, found.generated = len(asked), generation_metrics(asked, reference, this)
        for task, rows in metrics_by_task(asked, reference, this).items():
            found.tasks[task] = [*found.tasks.get(task, []), *rows]
    if html is not None:
        header = evaluation_html.header_of(paths.directory, _path(text), bundled)
        page.write(Path(html), evaluation_html.document(found, header))
    return found


@dataclass(frozen=True)
class _TextJob:
    """What is to be compared on a text; `path` None: the texts `bundled`. lengths: of retrieval prompts."""

    path: Path | None
    bundled: list[str]
    window: int
    windows: int
    lengths: list[int]
    groups: Collection[str]
    top_logprobs: int
    progress: Progress


def _evaluate_text(found: Summary, job: _TextJob, paths: _Compared, servers: list[Client]) -> None:
    """Fill in the teacher-forced figures: of all windows, of each task, of each length."""
    assert paths.against is not None
    config = StoredModel(paths.against).config
    tokens = read_tasks(job.path, job.bundled, paths.against, config, job.window, job.windows)
    prompts = retrieval_prompts(paths.against, config, job.path, job.bundled, job.lengths)
    if paths.directory is not None:
        extras = Extras(drafts="mtp" in job.groups)
        comparison = compare(paths.directory, paths.against, tokens.windows, job.progress, extras)
    else:
        comparison = compare_served(servers[0], paths.against, tokens.windows, job.top_logprobs, job.progress)
    _fill_in(found, comparison, job.groups)
    found.window, found.windows = job.window, len(tokens.windows)
    for task, numbers in tokens.by_task().items():
        found.tasks[task] = _chosen(comparison.of(numbers), job.groups)
    if paths.directory is not None:
        found.tasks |= long_contexts(paths.directory, paths.against, prompts, job.progress)


def _fill_in(found: Summary, comparison: FidelityComparison, groups: Collection[str]) -> None:
    """What was compared, as far as it was asked for."""
    found.rows = _chosen(comparison, groups)
    found.layers = [
        replace(
            layer,
            experts=layer.experts if "routing" in groups else None,
            indexer=layer.indexer if "indexer" in groups else None,
        )
        for layer in comparison.layers
    ]
    found.kl_is_bound = comparison.kl_is_bound
    found.per_window = comparison.kl.mean(1) if "kl" in groups else None


def _chosen(comparison: FidelityComparison, groups: Collection[str]) -> list[Metric]:
    return [row for row in figures(comparison) if row.group in groups]


def _lengths(given: str | Sequence[int] | None) -> list[int]:
    """ "4096,16384" -> [4096, 16384]."""
    try:
        return [int(each) for each in (given.split(",") if isinstance(given, str) else given or ())]
    except ValueError:
        raise EvaluationError(f"--lengths: {given!r} is no list of numbers", "such as 4096,16384,32768") from None


@dataclass(frozen=True)
class _Compared:
    """The two sides of an evaluation, as they were given."""

    directory: Path | None
    against: Path | None
    url: str | None
    prompts: Path | None
    against_url: str | None

    def check(self) -> None:
        if (self.directory is None) == (self.url is None):
            raise EvaluationError("give either DIR or --url", "DIR is computed here, --url is asked")
        if (self.prompts is None) != (self.against_url is None) or (self.prompts is not None and self.url is None):
            raise EvaluationError(
                "--prompts, --url and --against-url go together: two running servers answer the prompts",
                "start both with glm5-ascend serve",
            )
        if self.against is None and self.prompts is None:
            raise EvaluationError("nothing to compare with", "give the source checkpoint with --against SRC")


def _client(address: str, model: str, key: str) -> Client:
    client = Client(server_address(address), model, ANSWER_TIMEOUT_S, key)
    return replace(client, model=client.entry()["id"])


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


@dataclass
class AnalysisReport:
    """What was measured, and what a budget proposes.

    Attributes:
        steps: fall-backs in the order they are taken, empty without a budget.
        output_bytes: of the checkpoint with them.
    """

    analysis: run.Analysis
    steps: Sequence[Fallback]
    output_bytes: int

    def lines(self) -> list[str]:
        """For a terminal."""
        return list(summary.lines(self.analysis, list(self.steps), self.output_bytes))

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return summary.to_json(self.analysis, list(self.steps), self.output_bytes)


def analyze(
    source: str | Path,
    *,
    recipe: str = "w4a8",
    budget: int | str | None = None,
    out: str | Path | None = None,
    html: str | Path | None = None,
    calib: str | Path | None = None,
    samples: int = 32,
    seq_len: int = 512,
    seed: int = 1234,
    threads: int | None = None,
    progress: Progress = silent,
) -> AnalysisReport:
    """Where `recipe` loses accuracy on `source`, by layer, module and expert; nothing is quantized.

    Args:
        budget: bytes the output may have, or text such as "420GB": proposes what to keep in more bits. None: as the
            recipe's rules say, if it has any.
        out: with `budget` or rules: file to write the proposal to, as a recipe. html: file to write a report to.
        calib, samples, seq_len, seed, threads: as for `quantize`.
        progress: progress(text, done, total) in layers.
    Raises:
        Glm5Error: the first thing that would make the analysis fail; said before the work where it can be known.
    """
    limit = parse_size(budget, "--budget")
    if out is not None:
        recipes.check_place(Path(out))
    if html is not None:
        page.check_place(Path(html))
    prepared = run.prepare(run.AnalyzeOptions(Path(source), recipe, _path(calib), samples, seq_len, seed, threads))
    rules = prepared.plan.recipe.spec.fallback
    if limit is None and rules is not None:
        limit = int(prepared.plan.output_bytes * (1 + rules.extra_bytes))
    if limit is not None:
        propose([], prepared.plan.output_bytes, limit)  # a budget that is too small is said before the work
    elif out is not None:
        raise ConfigError("--out: a recipe is written for a budget or by rules", "give --budget as well")
    analysis = run.analyze(prepared, progress)
    report = AnalysisReport(analysis, (), analysis.plan.output_bytes)
    if limit is not None:
        _propose(report, limit, recipe, None if out is None else Path(out))
    if html is not None:
        made = analysis_html.document(analysis, list(report.steps), report.output_bytes)
        page.write(Path(html), made)
    return report


def _propose(report: AnalysisReport, limit: int, name: str, out: Path | None) -> None:
    """Fill in what the budget allows; write it as a recipe if `out` says where."""
    analysis = report.analysis
    report.steps = propose((unit for layer in analysis.layers for unit in layer.units), report.output_bytes, limit)
    changes = final_types(report.steps)
    wide = wide_caches(analysis.layers, analysis.plan.recipe.spec.fallback)
    value = recipes.with_fallbacks(analysis.recipe_path, analysis.plan.config, changes, wide)
    report.output_bytes = recipes.output_bytes(analysis.plan.source, value)
    if out is not None:
        removed, total = summary.removed_noise(analysis, report.steps)
        comment = [
            f"{name} with fall-backs, by glm5-ascend analyze: {report.output_bytes} bytes within a budget of {limit}.",
            f"Measured on {analysis.tokens} calibration tokens: {removed / total:.1%} of the noise that rounding adds "
            "to the",
            "residual streams goes. Assumed: units add up, and noise costs the same in every layer.",
            *recipes.engine_notes(changes),
            *recipes.cache_notes(wide),
        ]
        recipes.write(out, value, comment)
