"""Of what works on files: quantize, verify, fidelity."""

from __future__ import annotations

from tests.support.faults.fault import Fault, fault

FAULTS: tuple[Fault, ...] = (
    # -- quantize -----------------------------------------------------------------------------------------------------
    fault(
        "quantize",
        "a norm's gain is divided out of the weight that reads it",
        "rows *= torch.cat([gains[norm] for norm in weight.norm])",
        "rows /= torch.cat([gains[norm] for norm in weight.norm])",
        "test_rotation_alone_keeps_the_function",
    ),
    fault(
        "quantize",
        "the MTP layer's rotation holds 1 / g instead of g",
        "self.rotate_weight(identity * final_norm,",
        "self.rotate_weight(identity / final_norm,",
        "test_mtp_rot_undoes_the_folded_final_norm",
    ),
    fault(
        "quantize",
        "a smoothing scale is divided out on both sides",
        '        tensors[f"{target}.weight"] *= scale\n',
        '        tensors[f"{target}.weight"] /= scale\n',
        "test_fusing_alone_and_moving_scales_compute_the_same",
        "test_quantized_model_stays_near_its_source[w4a8-0.3]",
    ),
    fault(
        "quantize",
        "scale_bias with 7 for 8",
        '"scale_bias"] = 8.0 * sums * scale',
        '"scale_bias"] = 7.0 * sums * scale',
        "test_int4_stores_what_it_computed",
        "test_own_output_is_clean_and_matches_its_source[w4a8]",
    ),
    fault(
        "quantize",
        "sign of the static input's bias",
        "quant_bias = -input_offset.to(torch.int64) * sums",
        "quant_bias = input_offset.to(torch.int64) * sums",
        "test_static_linear_is_exact_integer_arithmetic",
    ),
    fault(
        "quantize",
        "the static input's offset is 128 too large",
        "torch.round(-low / input_scale) - 128)",
        "torch.round(-low / input_scale))",
        "test_static_input_covers_the_range",
    ),
    fault(
        "quantize",
        "minimum and maximum of two batches are swapped",
        "torch.minimum(low, self.low), torch.maximum(high, self.high)",
        "torch.maximum(low, self.low), torch.minimum(high, self.high)",
        "test_statistics_do_not_depend_on_how_tokens_arrive",
    ),
    fault(
        "quantize",
        "parts of a fused module may have different types",
        "if len({types[module] for module in typed}) > 1:",
        "if len({types[module] for module in typed}) > 3:",
        "test_plan_refuses_what_the_engine_cannot_run",
    ),
    fault(
        "quantize",
        "a journal line that a kill cut short counts",
        'if not line.endswith(b"\\n") or not isinstance(value, dict) or _encode(value) != line:',
        "if not isinstance(value, dict):",
        "test_a_torn_line_does_not_count",
    ),
    # -- verify -------------------------------------------------------------------------------------------------------
    fault(
        "verify",
        "a scale of 0 is accepted",
        "if bool((scale <= 0).any()):",
        "if bool((scale < 0).any()):",
        "test_mutants_at_more_positions[scale_not_positive]",
    ),
    fault(
        "verify",
        "the sign of quant_bias is not looked at",
        "stored - expected).abs() > (expected.abs() * QUANT_BIAS_TOLERANCE)",
        "stored.abs() - expected.abs()).abs() > (expected.abs() * QUANT_BIAS_TOLERANCE)",
        "test_mutants_at_more_positions[quant_bias_wrong]",
    ),
    fault(
        "verify",
        "input offsets of fused linears may differ",
        'for suffix in ("input_scale", "input_offset"):\n            a, b =',
        'for suffix in ("input_scale",):\n            a, b =',
        "test_a_mutant_is_reported_where_it_is[input_offsets_of_fused_linears_differ]",
    ),
    fault(
        "verify",
        "a wrong column is not an error",
        "            and self.column_error <= self.column_limit\n",
        "",
        "test_a_mutant_is_reported_where_it_is[column_scale_wrong]",
        "test_mutants_at_more_positions[column_scale_wrong]",
    ),
    fault(
        "verify",
        "the MTP rotation may belong to another global one",
        "if rest > ROT_TOLERANCE:",
        "if rest > 9e9:",
        "test_a_mutant_is_reported_where_it_is[rot_wrong]",
        "test_mutants_at_more_positions[rot_wrong]",
    ),
    fault(
        "verify",
        "a tensor that stands in two shards is not reported",
        "            if name in checkpoint.entries:\n                other =",
        "            if name in checkpoint.unreadable:\n                other =",
        "test_a_mutant_is_reported_where_it_is[tensor_in_two_shards]",
    ),
    # -- fidelity -----------------------------------------------------------------------------------------------------
    fault(
        "fidelity",
        "change of NLL with the wrong sign",
        "delta = quantized - reference",
        "delta = reference - quantized",
        "test_every_figure",
    ),
    fault(
        "fidelity",
        "the bound of a served KL leaves out what it does not know",
        "return (inside + outside).clamp_min(0)",
        "return inside.clamp_min(0)",
        "test_bound_against_whole_distributions",
    ),
)
