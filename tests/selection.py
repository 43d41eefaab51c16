"""Which parameters of a test the ordinary run takes (--full takes all), and which tests --fast does."""

import zlib
from collections.abc import Callable

import pytest

#: In the configuration's stash: the names of all tests that were collected, but for those marked as full.
COLLECTED = pytest.StashKey[list[str]]()


def each(names, values, short, others=pytest.mark.full, **options):
    """``pytest.mark.parametrize(names, values)``, where those that are not in ``short`` (a collection, or a function
    of the value) are tested with --full alone; with ``others=pytest.mark.emulated_full``, on the emulated GPU."""
    taken = short if isinstance(short, Callable) else short.__contains__

    def param(value):
        marks = () if taken(value) else others
        return pytest.param(*value, marks=marks) if isinstance(value, tuple) else pytest.param(value, marks=marks)

    return pytest.mark.parametrize(names, [param(value) for value in values], **options)


def half(values):
    """Every second one, for ``short``."""
    return list(values)[::2]


#: Of the cases of these tests, which are alike and take long together, the ordinary run takes about one of so many.
ONE_OF = {
    "tests/capture/test_data_numbers.py::test_errors_and_numbers_out_of_range_are_pytorchs": 2,
    "tests/capture/test_export_cache.py::test_whatever_the_graph_depends_on": 2,
    "tests/capture/test_loops.py::test_a_loop_is_captured_once": 2,
    "tests/capture/test_out_arguments.py::test_several": 2,
    "tests/capture/test_refilled_containers.py::test_cleared_and_filled": 3,
    "tests/capture/test_refilled_containers.py::test_fields_that_a_script_changes": 2,
    "tests/capture/test_size_types.py::test_isinstance": 3,
    "tests/core/test_torch_private.py::test_without_one_that_a_capture_needs": 2,
    "tests/cuda/test_attention.py::test_forward_and_backward": 2,
    "tests/cuda/test_autocast_plans.py::test_llama": 2,
    "tests/cuda/test_cudnn_norms_and_pools.py::test_average_pool": 2,
    "tests/cuda/test_cudnn_norms_and_pools.py::test_batch_norm": 2,
    "tests/cuda/test_epilogues.py::test_layers": 2,
    "tests/cuda/test_grouped.py::test_groups": 2,
    "tests/cuda/test_models.py::test_training_steps": 2,
    "tests/cuda/test_optim.py::test_twin": 2,
    "tests/cuda/test_optim.py::test_twins_of_the_others": 2,
    "tests/cuda/test_pieces.py::test_rows": 2,
    "tests/cuda/test_products.py::test_product": 2,
    "tests/cuda/test_products.py::test_product_and_sum": 2,
    "tests/cuda/test_sass.py::test_streams_read_and_write_16_bytes": 2,
    "tests/cuda/test_torch_attention.py::test_forward_and_backward": 2,
    "tests/cuda/test_torch_attention_lists.py::test_models": 2,
    "tests/cuda/test_twins.py::test_dropout_within_a_softmax_drops_what_the_cpu_drops": 2,
    "tests/cuda/test_twins.py::test_groups_of_any_lengths": 2,
    "tests/cuda/test_twins.py::test_multinomial_draws_those_of_the_cpu": 2,
    "tests/debug/test_verify.py::test_the_model_suite": 2,
    "tests/gpu/test_models.py::test_step": 2,
    "tests/guards/test_global_changes.py::test_numbers_that_follow_from_sizes": 2,
    "tests/guards/test_hook_analysis.py::test_hooks_registered_after_capture": 3,
    "tests/guards/test_tensor_attributes.py::test_values": 2,
    "tests/lowering/test_bad_indices.py::test_what_pytorch_refuses_is_refused": 2,
    "tests/lowering/test_draws.py::test_distributions": 2,
    "tests/lowering/test_packed_sequence.py::test_layers": 2,
    "tests/models/test_architectures.py::test_float64": 2,
    "tests/models/test_architectures.py::test_hard": 2,
    "tests/models/test_autocast.py::test_every_gradient": 2,
    "tests/ops/test_alignment.py::test_unaligned": 3,
    "tests/ops/test_beyond_caches.py::test_pointwise": 2,
    "tests/optim/test_fused_adam.py::test_modes_in_a_thousand_steps": 2,
    "tests/optim/test_fused_optimizers.py::test_as_torch": 2,
    "tests/passes/test_attention.py::test_16_bits_are_as_near_to_the_exact_result_as_in_pytorch": 2,
    "tests/passes/test_attention.py::test_attention_by_torch": 2,
    "tests/passes/test_attention.py::test_attention_that_torch_is_not_asked_for": 2,
    "tests/passes/test_attention.py::test_models": 2,
    "tests/passes/test_attention.py::test_rows_that_matter": 2,
    "tests/passes/test_attention_dropout.py::test_heads_that_share_keys": 2,
    "tests/passes/test_attention_dropout.py::test_masks_and_sizes": 2,
    "tests/passes/test_casts.py::test_norms_and_residuals_of_autocast": 2,
    "tests/passes/test_rows.py::test_bad_indices_of_rows_that_are_left_out": 2,
    "tests/passes/test_rows.py::test_ignored_labels": 2,
    "tests/passes/test_rows.py::test_mean_of_the_tokens_that_are_there": 2,
    "tests/passes/test_rows.py::test_padding_alone": 2,
    "tests/probe/test_probe.py::test_cell": 2,
    "tests/probe/test_probe.py::test_entry": 2,
    "tests/probe/test_special.py::test_special": 2,
    "tests/runtime/test_argument_objects.py::test_sparse_arguments": 2,
    "tests/runtime/test_lazy_logits.py::test_a_look_finds_what_pytorch_has": 2,
    "tests/runtime/test_lazy_logits.py::test_gradients": 2,
    "tests/runtime/test_lazy_logits.py::test_scores_after_a_step_are_those_before_it": 2,
    "tests/runtime/test_refilled_indices.py::test_far": 2,
}


def waits(test):
    """Whether the case with this name is one of those of ``ONE_OF`` that are left to --full: drawn by name."""
    test, _, parameters = test.partition("[")
    return test in ONE_OF and zlib.crc32(parameters.encode()) % ONE_OF[test] != 0


#: The sample of --fast: of each test function of these files so many tests, of those without --full, spread evenly.
FAST = {
    "tests/ops/test_ops.py": 3,  # of each family
    "tests/ops/test_random.py": 2,
    "tests/ops/test_views.py": 2,
    "tests/passes/test_passes.py": 8,
    "tests/models/test_architectures.py": 4,
    "tests/runtime/test_contract.py": 2,
    "tests/guards/test_guards.py": 2,
    "tests/engine/test_processes.py": 1,
    "tests/optim/test_fused_adam.py": 1,
    "tests/core/test_config.py": 2,
    "tests/project/test_layout.py": 400,
    "tests/project/test_types.py": 400,
    "tests/project/test_files.py": 20,
}
FAMILIES = "tests/ops/test_ops.py::test_case["


def sample(items):
    """Those of ``items``, which pytest has collected, that --fast runs."""
    groups = {}
    for item in items:
        test, _, parameters = item.nodeid.partition("[")
        family = parameters.partition("-")[0] if item.nodeid.startswith(FAMILIES) else ""
        if test.partition("::")[0] in FAST and not item.get_closest_marker("full"):
            groups.setdefault((test, family), []).append(item)
    chosen = []
    for (test, _), group in groups.items():
        most = FAST[test.partition("::")[0]]
        chosen += group[:: max(1, -(-len(group) // most))]
    return chosen
