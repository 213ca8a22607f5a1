"""Faults that a test must find, one line of the product each: `python -m tests.support.faults` plants them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    Attributes:
        area: the part of the product that it is in.
        what: what is wrong, in words.
        edits: (right code, wrong code). The first whose right code stands exactly once in the product is applied.
        tests: names of test functions, with their parameters where one case is enough; those that must find it.
    """

    area: str
    what: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


def _fault(area: str, what: str, right: str, wrong: str, *tests: str) -> Fault:
    return Fault(area, what, ((right, wrong),), tests)


FAULTS = (
    # -- quantize -----------------------------------------------------------------------------------------------------
    _fault(
        "quantize",
        "a norm's gain is divided out of the weight that reads it",
        "tensors[name] *= torch.cat([gains[norm] for norm in part.norm])",
        "tensors[name] /= torch.cat([gains[norm] for norm in part.norm])",
        "test_rotation_alone_keeps_the_function",
    ),
    _fault(
        "quantize",
        "the MTP layer's rotation holds 1 / g instead of g",
        "self.rotate_weight(identity * final_norm,",
        "self.rotate_weight(identity / final_norm,",
        "test_mtp_rot_undoes_the_folded_final_norm",
    ),
    _fault(
        "quantize",
        "a smoothing scale is divided out on both sides",
        '        tensors[f"{target}.weight"] *= scale\n',
        '        tensors[f"{target}.weight"] /= scale\n',
        "test_fusing_alone_and_moving_scales_compute_the_same",
        "test_quantized_model_stays_near_its_source[w4a8-0.3]",
    ),
    _fault(
        "quantize",
        "scale_bias with 7 for 8",
        '"scale_bias"] = 8.0 * sums * scale',
        '"scale_bias"] = 7.0 * sums * scale',
        "test_int4_stores_what_it_computed",
        "test_own_output_is_clean_and_matches_its_source[w4a8]",
    ),
    _fault(
        "quantize",
        "sign of the static input's bias",
        "quant_bias = -input_offset.to(torch.int64) * sums",
        "quant_bias = input_offset.to(torch.int64) * sums",
        "test_static_linear_is_exact_integer_arithmetic",
    ),
    _fault(
        "quantize",
        "the static input's offset is 128 too large",
        "torch.round(-low / input_scale) - 128)",
        "torch.round(-low / input_scale))",
        "test_static_input_covers_the_range",
    ),
    _fault(
        "quantize",
        "minimum and maximum of two batches are swapped",
        "torch.minimum(low, self.low), torch.maximum(high, self.high)",
        "torch.maximum(low, self.low), torch.minimum(high, self.high)",
        "test_statistics_do_not_depend_on_how_tokens_arrive",
    ),
    _fault(
        "quantize",
        "parts of a fused module may have different types",
        "                if len(kinds) > 1:\n                    raise RecipeError(",
        "                if len(kinds) > 3:\n                    raise RecipeError(",
        "test_plan_refuses_what_the_engine_cannot_run",
    ),
    _fault(
        "quantize",
        "a journal line that a kill cut short counts",
        'if not line.endswith(b"\\n") or not isinstance(value, dict) or _encode(value) != line:',
        "if not isinstance(value, dict):",
        "test_a_torn_line_does_not_count",
    ),
    # -- verify -------------------------------------------------------------------------------------------------------
    _fault(
        "verify",
        "a scale of 0 is accepted",
        "if bool((scale <= 0).any()):",
        "if bool((scale < 0).any()):",
        "test_every_mutant_is_reported_where_it_is[scale_not_positive]",
    ),
    _fault(
        "verify",
        "the sign of quant_bias is not looked at",
        "stored - wanted).abs() > (wanted.abs() * QUANT_BIAS_TOLERANCE)",
        "stored.abs() - wanted.abs()).abs() > (wanted.abs() * QUANT_BIAS_TOLERANCE)",
        "test_every_mutant_is_reported_where_it_is[quant_bias_wrong]",
        "test_every_mutant_is_reported_where_it_is[input_offset_moved]",
    ),
    _fault(
        "verify",
        "input offsets of fused linears may differ",
        'for suffix in ("input_scale", "input_offset"):\n            a, b =',
        'for suffix in ("input_scale",):\n            a, b =',
        "test_every_mutant_is_reported_where_it_is[input_offsets_of_fused_linears_differ]",
    ),
    _fault(
        "verify",
        "a wrong column is not an error",
        "            and self.column_error <= self.column_limit\n",
        "",
        "test_every_mutant_is_reported_where_it_is[column_scale_wrong]",
    ),
    _fault(
        "verify",
        "the MTP rotation may belong to another global one",
        "if rest > ROT_TOLERANCE:",
        "if rest > 9e9:",
        "test_every_mutant_is_reported_where_it_is[rot_wrong]",
    ),
    Fault(
        "verify",
        "a tensor that stands in two shards is not reported",
        (
            (
                "            if name in contents.entries:\n                other =",
                "            if name in contents.unreadable:\n                other =",
            ),
            (
                "            if name in checkpoint.entries:\n                other =",
                "            if name in checkpoint.unreadable:\n                other =",
            ),
        ),
        ("test_every_mutant_is_reported_where_it_is[tensor_in_two_shards]",),
    ),
    # -- ops ----------------------------------------------------------------------------------------------------------
    _fault(
        "ops",
        "the rotation turns the other way (compiled)",
        "even * cos[pair] - odd * sin[pair], odd * cos[pair] + even * sin[pair]",
        "even * cos[pair] + odd * sin[pair], odd * cos[pair] - even * sin[pair]",
        "test_every_compiled_op_agrees_with_its_reference[mla_preprocess]",
    ),
    _fault(
        "ops",
        "a query does not see its own position",
        "visible = lengths[request] - starts[1:][request] + np.arange(num_tokens) + 1",
        "visible = lengths[request] - starts[1:][request] + np.arange(num_tokens)",
        "test_matches_brute_force_on_ragged_paged_batches",
    ),
    _fault(
        "ops",
        "scores without the ReLU (reference)",
        "@ keys.T).relu_().view(",
        "@ keys.T).view(",
        "test_matches_brute_force_on_ragged_paged_batches",
    ),
    Fault(
        "ops",
        "online softmax scales what came before the wrong way",
        (
            ("factor = np.exp(before - highest)", "factor = np.exp(highest - before)"),
            ("factor = np.exp(before - peak)", "factor = np.exp(peak - before)"),
        ),
        ("test_every_compiled_op_agrees_with_its_reference[sparse_flash_attention]",),
    ),
    _fault(
        "ops",
        "two INT4 rows change places in a byte (compiled)",
        "shift = int64(-1) if bits == 8 else int64(number % 2 * 4)",
        "shift = int64(-1) if bits == 8 else int64(4 - number % 2 * 4)",
        "test_rounding_agrees_to_the_byte",
    ),
    _fault(
        "ops",
        "an expert's output without its router weight (compiled)",
        "out[token[pair], column] += y[pair, column] * weight[pair]",
        "out[token[pair], column] += y[pair, column]",
        "test_every_compiled_op_agrees_with_its_reference[w4a8_moe]",
    ),
    _fault(
        "ops",
        "a Hadamard level subtracts in the wrong order",
        "builder.fadd(s, u), builder.fadd(t, w), builder.fsub(s, u), builder.fsub(t, w)",
        "builder.fadd(s, u), builder.fadd(t, w), builder.fsub(u, s), builder.fsub(t, w)",
        "test_both_agree_along_both_dimensions",
    ),
    _fault(
        "ops",
        "a negative slot (padding) is written to the last row",
        "        keep = slots >= 0\n",
        "        keep = slots >= -1\n",
        "test_what_lies_beside_the_slots_is_not_touched",
    ),
    # -- serve --------------------------------------------------------------------------------------------------------
    _fault(
        "serve",
        "gate and up of an expert change places while loading",
        'target = gate if shard_id == "w1" else up',
        'target = up if shard_id == "w1" else gate',
        "test_every_layer_is_exact[rotated_checkpoint]",
    ),
    _fault(
        "serve",
        "sine and cosine change places",
        "cos, sin = self.rotary_emb.cos_sin_cache[positions].chunk(2, dim=-1)",
        "sin, cos = self.rotary_emb.cos_sin_cache[positions].chunk(2, dim=-1)",
        "test_chunked_prefill_equals_transformers",
    ),
    _fault(
        "serve",
        "experts of one layer may have different types",
        '            first = self.type_of(f"{moe}.experts")\n            if kind != first:',
        '            first = self.type_of(f"{moe}.experts")\n            if kind is None:',
        "test_what_cannot_be_served_is_named",
    ),
    _fault(
        "serve",
        "keys that vLLM would misread are not looked at",
        "        if config.get(key) != value:\n",
        "        if config.get(key, value) != value:\n",
        "test_configs_vllm_would_misread_are_refused",
    ),
    _fault(
        "serve",
        "a flag spelled with underscores does not replace ours",
        'flags = {arg.split("=", 1)[0].replace("_", "-") for arg',
        'flags = {arg.split("=", 1)[0] for arg',
        "test_the_users_flag_replaces_ours",
    ),
    _fault(
        "serve",
        "a missing tensor of a fused parameter is not noticed",
        'return [name.replace(f".{fused}.", f".{shard}.") for shard in shards]',
        'return [name.replace(f".{fused}.", f".{shards[0]}.")]',
        "test_source_tensors",
        "test_one_missing_shard_of_a_fused_module_is_named",
    ),
    # -- fidelity -----------------------------------------------------------------------------------------------------
    _fault(
        "fidelity",
        "change of NLL with the wrong sign",
        "top1, delta = found.same_top1.double(), b - a",
        "top1, delta = found.same_top1.double(), a - b",
        "test_every_figure",
    ),
    _fault(
        "fidelity",
        "the bound of a served KL leaves out what it does not know",
        "return (inside + outside).clamp_min(0)",
        "return inside.clamp_min(0)",
        "test_bound_against_whole_distributions",
    ),
    # -- plan ---------------------------------------------------------------------------------------------------------
    _fault(
        "plan",
        "scales of packed cache rows in two bytes",
        "_FP32 * (c.kv_lora_rank // _SCALE_TILE)",
        "_FP16 * (c.kv_lora_rank // _SCALE_TILE)",
        "test_known_size",
    ),
    _fault(
        "plan",
        "low and high ends of the budget change places",
        '(rest("value"), rest("high"), rest("low"))',
        '(rest("value"), rest("low"), rest("high"))',
        "test_unknowns_have_a_range_around_their_value",
    ),
    _fault(
        "plan",
        "decoding pays eager launches with graphs, and the other way round",
        "efficiency.eager_seconds if engine.eager_decode else efficiency.graph_seconds",
        "efficiency.graph_seconds if engine.eager_decode else efficiency.eager_seconds",
        "test_committed_constants_explain_the_public_rows",
        "test_fit_finds_the_constants_that_made_the_data",
    ),
    _fault(
        "plan",
        "a finished request keeps its cache",
        "            held -= cache_tokens(queue, i)\n",
        "",
        "test_aggregated_steps_are_within_two_percent",
        "test_full_cache_makes_requests_wait",
    ),
    # -- deploy -------------------------------------------------------------------------------------------------------
    _fault(
        "deploy",
        "ranks of the second node start at its number",
        '"start_rank": str(place.node * role.local_ranks),',
        '"start_rank": str(place.node),',
        "test_a_second_node_has_no_api_server",
    ),
    _fault(
        "deploy",
        "`or` of a rule is settled by a false part",
        "    if is_or in known:\n        return is_or\n",
        "    if not is_or in known:\n        return is_or\n",
        "test_logic_with_unknown_facts",
    ),
    _fault(
        "deploy",
        "all servers of a machine get the same port",
        'f"PORT=$((${{FIRST_PORT:-{role.port}}} + LOCAL))",',
        'f"PORT=$((${{FIRST_PORT:-{role.port}}}))",',
        "test_the_script_starts_what_serve_starts",
    ),
    Fault(
        "deploy",
        "a known bad combination is printed and served",
        (
            ("    if errors and not skip:\n", "    if errors and skip:\n"),
            ("    if errors and not only_warn:\n", "    if errors and only_warn:\n"),
        ),
        ("test_what_cannot_be_is_refused",),
    ),
)
