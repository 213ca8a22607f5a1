"""`evaluate()` and `analyze()`: the functions of the commands `eval` and `analyze`."""

from __future__ import annotations

from pathlib import Path

from glm5_ascend.checkpoint.types import FLOAT
from glm5_ascend.errors import ConfigError, EvaluationError
from glm5_ascend.fidelity.analysis import recipe as recipes
from glm5_ascend.fidelity.analysis import run
from glm5_ascend.fidelity.analysis.budget import propose
from glm5_ascend.fidelity.analysis.report import AnalysisReport
from glm5_ascend.fidelity.evaluation.compare import compare
from glm5_ascend.fidelity.evaluation.metrics import metrics
from glm5_ascend.fidelity.evaluation.report import EvaluationReport
from glm5_ascend.fidelity.evaluation.served import compare_served
from glm5_ascend.fidelity.evaluation.windows import read_tasks
from glm5_ascend.fidelity.options import AnalyzeOptions, EvaluateOptions
from glm5_ascend.options import with_options
from glm5_ascend.quantize.model_card import add_accuracy, check_card
from glm5_ascend.quantize.options import parse_size
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.progress import Progress, silent
from glm5_ascend.quantize.recipe import Recipe
from glm5_ascend.report import page
from glm5_ascend.serve.client import Client, server_address

ANSWER_TIMEOUT_S = 600.0


@with_options(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> EvaluationReport:
    """KL, top-1, flips, NLL and routing of a quantized checkpoint or server against its source.

    Raises:
        EvaluationError: arguments or models that cannot be compared. CheckFailedError: NaN or infinity.
        MissingEnvironmentError: a server does not answer.
    """
    return run_evaluation(options)


def run_evaluation(options: EvaluateOptions, progress: Progress = silent, key: str = "") -> EvaluationReport:
    """`evaluate` for a caller that shows the progress; `key`: API key of the server."""
    _check_eval_options(options)
    directory, source, text = _path(options.directory), Path(options.against), _path(options.text)
    server = None
    if options.url is not None:
        server = Client(server_address(options.url), timeout=ANSWER_TIMEOUT_S, key=key).named()
    tokens = read_tasks(text, source, options.window, options.windows)
    if directory is not None:
        comparison = compare(directory, source, tokens.windows, progress, drafts=True)
    else:
        assert server is not None
        comparison = compare_served(server, source, tokens.windows, progress)
    tasks = {task: metrics(comparison.select(windows)) for task, windows in tokens.by_task().items()}
    report = EvaluationReport(
        options.url or str(directory), str(source), metrics(comparison), comparison.layers, options.window,
        len(tokens.windows), comparison.kl_is_bound, tasks,
    )  # fmt: skip
    if options.card and directory is not None:
        add_accuracy(directory, *report.card_figures(text))
    if options.html is not None:
        page.write(Path(options.html), report.page())
    return report


def _check_eval_options(options: EvaluateOptions) -> None:
    if (options.directory is None) != (options.url is not None):
        raise EvaluationError("give either DIR or --url", "DIR is computed here, --url is a running server")
    if options.card:
        if options.directory is None:
            raise EvaluationError("--card: the card belongs to a checkpoint", "give DIR")
        check_card(Path(options.directory))
    if options.html is not None:
        page.check_path(Path(options.html))


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


@with_options(AnalyzeOptions)
def analyze(options: AnalyzeOptions) -> AnalysisReport:
    """Where a recipe loses accuracy on a source, by layer and unit; nothing is quantized.

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
    report.output_bytes = QuantizationPlan(analysis.plan.source, Recipe.model_validate(value)).output_bytes
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
