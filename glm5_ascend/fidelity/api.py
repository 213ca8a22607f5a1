"""`evaluate()` and `analyze()`: the functions of the commands `eval` and `analyze`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from glm5_ascend.checkpoint.types import FLOAT
from glm5_ascend.errors import ConfigError, EvaluationError
from glm5_ascend.fidelity.analysis import recipe as recipes
from glm5_ascend.fidelity.analysis import run
from glm5_ascend.fidelity.analysis.budget import propose
from glm5_ascend.fidelity.analysis.report import AnalysisReport
from glm5_ascend.fidelity.evaluation.compare import compare
from glm5_ascend.fidelity.evaluation.generation import generate, generation_metrics, metrics_by_task, read_prompts
from glm5_ascend.fidelity.evaluation.html import document, header_of
from glm5_ascend.fidelity.evaluation.long_context import compare_long_contexts, retrieval_prompts
from glm5_ascend.fidelity.evaluation.metrics import metrics
from glm5_ascend.fidelity.evaluation.report import EvaluationReport
from glm5_ascend.fidelity.evaluation.served import compare_served
from glm5_ascend.fidelity.evaluation.windows import read_tasks
from glm5_ascend.fidelity.options import AnalyzeOptions, EvaluateOptions
from glm5_ascend.options import with_options
from glm5_ascend.quantize.model_card import add_accuracy, check_card
from glm5_ascend.quantize.options import parse_size
from glm5_ascend.quantize.progress import Progress, silent
from glm5_ascend.report import page
from glm5_ascend.serve.client import Client, server_address

ANSWER_TIMEOUT_S = 600.0


@with_options(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> EvaluationReport:
    """KL, top-1, flips, NLL, routing and answers of a quantized checkpoint or server against its source.

    Raises:
        EvaluationError: arguments or models that cannot be compared. CheckFailedError: NaN or infinity.
        MissingEnvironmentError: a server does not answer.
    """
    return run_evaluation(options)


def run_evaluation(options: EvaluateOptions, progress: Progress = silent, key: str = "") -> EvaluationReport:
    """`evaluate` for a caller that shows the progress; `key`: API key of the servers."""
    _check_eval_options(options)
    prompts = read_prompts(Path(options.prompts)) if options.prompts is not None else []
    addresses = [address for address in (options.url, options.against_url) if address is not None]
    servers = [_client(address, key) for address in addresses]
    report = EvaluationReport(options.url or str(options.directory), str(options.against or options.against_url))
    if options.against is not None:
        _evaluate_text(report, options, Path(options.against), servers, progress)
    if prompts:
        quantized, reference = (generate(server, prompts, options.max_tokens) for server in servers)
        report.prompts, report.generated = len(prompts), generation_metrics(prompts, reference, quantized)
        for task, rows in metrics_by_task(prompts, reference, quantized).items():
            report.tasks[task] = [*report.tasks.get(task, []), *rows]
    if options.card:
        add_accuracy(Path(str(options.directory)), *report.card_figures(_path(options.text)))
    if options.html is not None:
        teacher_forced = options.against is not None
        header = header_of(_path(options.directory), _path(options.text), teacher_forced)
        page.write(Path(options.html), document(report, header))
    return report


def _evaluate_text(
    report: EvaluationReport, options: EvaluateOptions, source: Path, servers: list[Client], progress: Progress
) -> None:
    text, directory = _path(options.text), _path(options.directory)
    tokens = read_tasks(text, source, options.window, options.windows)
    prompts = retrieval_prompts(source, text, _parse_lengths(options.lengths))
    if directory is not None:
        comparison = compare(directory, source, tokens.windows, progress, drafts=True)
    else:
        comparison = compare_served(servers[0], source, tokens.windows, progress)
    report.rows, report.kl_is_bound = metrics(comparison), comparison.kl_is_bound
    report.window, report.windows = options.window, len(tokens.windows)
    report.window_kl, report.layers = comparison.kl.mean(1), comparison.layers
    for task, windows in tokens.by_task().items():
        report.tasks[task] = metrics(comparison.select(windows))
    if directory is not None:
        report.tasks |= compare_long_contexts(directory, source, prompts, progress)


def _check_eval_options(options: EvaluateOptions) -> None:
    prompts, url = options.prompts is not None, options.url is not None
    if (options.directory is None) != url:
        raise EvaluationError("give either DIR or --url", "DIR is computed here, --url is a running server")
    if prompts != (options.against_url is not None) or (prompts and not url):
        raise EvaluationError(
            "--prompts, --url and --against-url belong together: two running servers answer the prompts",
            "start both with glm5-ascend serve",
        )
    if options.against is None and not prompts:
        raise EvaluationError("nothing to compare with", "give the source checkpoint with --against SRC")
    if _parse_lengths(options.lengths) and options.directory is None:
        raise EvaluationError("--lengths looks into a checkpoint: a server does not show its keys", "give DIR")
    if options.card and (options.directory is None or options.against is None):
        raise EvaluationError("--card: the card belongs to a checkpoint", "give DIR and --against SRC")
    if options.card:
        check_card(Path(str(options.directory)))
    if options.html is not None:
        page.check_path(Path(options.html))


def _parse_lengths(lengths: str | Sequence[int] | None) -> list[int]:
    try:
        return [int(length) for length in (lengths.split(",") if isinstance(lengths, str) else lengths or ())]
    except ValueError:
        raise EvaluationError(f"--lengths: {lengths!r} is no list of numbers", "such as 4096,16384,32768") from None


def _client(address: str, key: str) -> Client:
    client = Client(server_address(address), "", ANSWER_TIMEOUT_S, key)
    return replace(client, model=client.entry()["id"])


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


@with_options(AnalyzeOptions)
def analyze(options: AnalyzeOptions) -> AnalysisReport:
    """Where a recipe loses accuracy on a source, by layer, module and expert; nothing is quantized.

    Raises:
        Glm5Error: the first thing that would make the analysis fail, before the work where it can be known.
    """
    return run_analysis(options)


def run_analysis(options: AnalyzeOptions, progress: Progress = silent) -> AnalysisReport:
    """`analyze` for a caller that shows the progress."""
    limit, out = parse_size(options.budget, "--budget"), _path(options.out)
    if out is not None:
        recipes.check_path(out)
    prepared = run.prepare(options)
    rules = prepared.plan.recipe.spec.fallback
    if limit is None and rules is not None:
        limit = int(prepared.plan.output_bytes * (1 + rules.extra_bytes))
    if limit is not None:
        propose([], prepared.plan.output_bytes, limit)  # a budget that is too small is refused before the work
    elif out is not None:
        raise ConfigError("--out: a recipe is written for a budget or by rules", "give --budget as well")
    report = AnalysisReport(run.analyze(prepared, progress), prepared.plan.output_bytes)
    if limit is not None:
        _propose(report, limit, out)
    return report


def _propose(report: AnalysisReport, limit: int, out: Path | None) -> None:
    analysis = report.analysis
    report.steps = propose((unit for layer in analysis.layers for unit in layer.units), report.output_bytes, limit)
    value = recipes.with_fallbacks(analysis.recipe_path, analysis.plan.config, report.changes, report.wide_caches)
    report.output_bytes = recipes.output_bytes(analysis.plan.source, value)
    if out is not None:
        name, share = analysis.options.recipe, report.noise_removed / report.noise
        comment = [
            f"{name} with fall-backs, by glm5-ascend analyze: {report.output_bytes} bytes within a budget of {limit}.",
            f"Measured on {analysis.calibration.tokens} calibration tokens: it removes {share:.1%} of the noise that",
            "rounding adds to the residual streams. Assumed: units add up, noise costs the same in every layer.",
        ]
        if any(unit.experts and scheme == FLOAT for unit, scheme in report.changes):
            comment.append("SGLang does not load it: it has routed experts in FLOAT.")
        recipes.write(out, value, comment)
