"""Of what serves, and of what plans it: ops, serve, plan, deploy."""

from __future__ import annotations

from tests.support.faults.fault import Fault, fault

FAULTS: tuple[Fault, ...] = (
    # -- ops ----------------------------------------------------------------------------------------------------------
    fault(
        "ops",
        "the rotation turns the other way (compiled)",
        "x[index], x[index + 1] = even * cos - odd * sin, odd * cos + even * sin",
        "x[index], x[index + 1] = even * cos + odd * sin, odd * cos - even * sin",
        "test_every_compiled_op_agrees_with_its_reference[mla_preprocess]",
    ),
    fault(
        "ops",
        "a query does not see its own position",
        "return request, lengths[request] - starts[1:][request] + np.arange(num_tokens) + 1",
        "return request, lengths[request] - starts[1:][request] + np.arange(num_tokens)",
        "test_matches_brute_force_on_ragged_paged_batches",
    ),
    fault(
        "ops",
        "scores without the ReLU (reference)",
        "@ keys.T).relu_().view(",
        "@ keys.T).view(",
        "test_matches_brute_force_on_ragged_paged_batches",
    ),
    fault(
        "ops",
        "online softmax scales what came before the wrong way",
        "factor = np.exp(before - peak)",
        "factor = np.exp(peak - before)",
        "test_finite_numbers_do_not_need_the_reference",
    ),
    fault(
        "ops",
        "two INT4 rows change places in a byte (compiled)",
        "shift = int64(-1) if bits == 8 else int64(number % 2 * 4)",
        "shift = int64(-1) if bits == 8 else int64(4 - number % 2 * 4)",
        "test_rounding_agrees_to_the_byte",
    ),
    fault(
        "ops",
        "an expert's output without its router weight (compiled)",
        "out[token[pair], column] += y[pair, column] * weight[pair]",
        "out[token[pair], column] += y[pair, column]",
        "test_every_compiled_op_agrees_with_its_reference[w4a8_moe]",
    ),
    fault(
        "ops",
        "a Hadamard level subtracts in the wrong order",
        "builder.fadd(a, b), builder.fsub(a, b)",
        "builder.fadd(a, b), builder.fsub(b, a)",
        "test_both_agree_along_both_dimensions",
    ),
    fault(
        "ops",
        "a negative slot (padding) is written to the last row",
        "        keep = slots >= 0\n",
        "        keep = slots >= -1\n",
        "test_what_lies_beside_the_slots_is_not_touched",
    ),
    # -- serve --------------------------------------------------------------------------------------------------------
    fault(
        "serve",
        "gate and up of an expert change places while loading",
        "for pair in zip(gate, up, strict=True)",
        "for pair in zip(up, gate, strict=True)",
        "test_every_layer_is_exact[quantized_checkpoint]",
    ),
    fault(
        "serve",
        "sine and cosine change places",
        "cos, sin = table[positions].float().chunk(2, dim=-1)",
        "sin, cos = table[positions].float().chunk(2, dim=-1)",
        "test_chunked_prefill_equals_transformers",
    ),
    fault(
        "serve",
        "experts of one layer may have different types",
        "if self.type_of_linear(module) != self.type_of_linear(first):",
        "if not self.type_of_linear(module):",
        "test_bad_descriptions_are_refused",
    ),
    fault(
        "serve",
        "keys that vLLM would misread are not looked at",
        "        if config.get(key) != value:\n",
        "        if config.get(key, value) != value:\n",
        "test_configs_that_vllm_would_misread_are_refused",
    ),
    fault(
        "serve",
        "a flag spelled with underscores does not replace ours",
        'base = base.replace("_", "-")',
        "pass",
        "test_the_users_flag_replaces_ours",
    ),
    fault(
        "serve",
        "a missing tensor of the model is not noticed",
        "            if entry is None:\n                missing.append(name)\n",
        "            if entry is None:\n                continue\n",
        "test_what_target_and_draft_need",
        "test_what_a_quantized_linear_needs",
    ),
    # -- plan ---------------------------------------------------------------------------------------------------------
    fault(
        "plan",
        "scales of packed cache rows in two bytes",
        "FP32 * (c.kv_lora_rank // _SCALE_TILE)",
        "_FP16 * (c.kv_lora_rank // _SCALE_TILE)",
        "test_known_size",
    ),
    fault(
        "plan",
        "low and high ends of the budget change places",
        "zip(ENDS, reversed(ENDS), strict=True)",
        "zip(ENDS, ENDS, strict=True)",
        "test_unknowns_have_a_range_around_their_value",
    ),
    fault(
        "plan",
        "decoding pays eager launches with graphs, and the other way round",
        "        if engine.eager:\n            launch",
        "        if not engine.eager:\n            launch",
        "test_decoding_without_graphs_pays_for_each_launch",
        "test_committed_constants_explain_the_public_rows",
    ),
    fault(
        "plan",
        "the verdict on the SLO is about another TTFT than the printed one",
        "        rate, ttft = _run(",
        "        rate, _ = _run(",
        "test_the_verdict_is_about_the_printed_latencies",
        "test_warm_caches_and_more_acceptance_are_faster",
    ),
    # -- deploy -------------------------------------------------------------------------------------------------------
    fault(
        "deploy",
        "ranks of the second node start at its number",
        '"start_rank": str(server.node * role.local_ranks),',
        '"start_rank": str(server.node),',
        "test_a_second_node_has_no_api_server",
    ),
    fault(
        "deploy",
        "`or` of a rule is settled by a false part",
        "    if is_or in operands:\n        return is_or\n",
        "    if is_or not in operands:\n        return is_or\n",
        "test_logic_with_unknown_facts",
    ),
    fault(
        "deploy",
        "all servers of a machine get the same port",
        'f"PORT=$((${{FIRST_PORT:-{role.port}}} + LOCAL))",',
        'f"PORT=$((${{FIRST_PORT:-{role.port}}}))",',
        "test_the_script_starts_what_serve_starts",
    ),
    Fault(
        "deploy",
        "a known bad combination is printed and served",
        (("    if errors and not options.skip_verify:\n", "    if errors and options.skip_verify:\n"),),
        ("test_what_cannot_be_is_refused",),
    ),
)
