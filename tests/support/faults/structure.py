"""Faults in the shared structure: options, signals, engine lines, methods, the model's tables, readers of files."""

from __future__ import annotations

from tests.support.faults.fault import Fault, fault

FAULTS: tuple[Fault, ...] = (
    fault(
        "options",
        "a function of options drops its keyword arguments",
        "return function(options(*args, **kwargs))",
        "return function(options(*args))",
        "test_a_function_takes_the_arguments_of_its_options_or_the_options",
    ),
    fault(
        "options",
        "the upper bound of an option is not checked",
        '(("min", option.min), ("max", option.max))',
        '(("min", option.min), ("max", None))',
        "test_a_command_has_the_options_of_its_dataclass",
    ),
    fault(
        "options",
        "a path that may be left out is read as text",
        "        single = Path\n",
        "        single = str\n",
        "test_type_of_a_word_of_the_shell",
    ),
    fault(
        "signals",
        "a signal between commands ends with exit code 0",
        "os._exit(report_interrupted())",
        "os._exit(report_interrupted() * 0)",
        "test_while_it_imports_and_works",
    ),
    fault(
        "signals",
        "an interrupt that a destructor drops is not sent again",
        "KeyboardInterrupt):\n        signal.setitimer(signal.ITIMER_REAL, _RETRY_S)\n",
        "KeyboardInterrupt):\n        pass\n",
        "test_none_is_swallowed",
    ),
    fault(
        "engine lines",
        "post releases belong to no line",
        "return not version.is_devrelease and version.release[:2] == self.release",
        "return not version.is_postrelease and version.release[:2] == self.release",
        "test_a_pre_release_is_of_its_own_line",
    ),
    fault(
        "quantize",
        "GPTQ takes the inputs in the order of the columns",
        "inputs = rows[:, perm].T.contiguous()",
        "inputs = rows.T.contiguous()",
        "test_error_on_other_texts_falls_with_the_tokens",
    ),
    fault(
        "quantize",
        "a row of zeros gets a scale of 0",
        "peak / LARGEST[bits], torch.ones_like(peak))",
        "peak / LARGEST[bits], torch.zeros_like(peak))",
        "test_linear_scales_are_what_the_engine_will_hold",
        "test_ssz_is_never_worse_than_min_max",
    ),
    fault(
        "files",
        "a key given twice in JSON is accepted",
        "    if len(entries) < len(pairs):\n",
        "    if len(entries) > len(pairs):\n",
        "test_bad_content",
    ),
    fault(
        "deploy",
        "a step that did not run is accepted",
        "accepted = not names[FAILED] and not names[NOT_RUN]",
        "accepted = not names[FAILED]",
        "test_a_failed_step_does_not_end_the_others",
        "test_without_an_npu",
    ),
)
