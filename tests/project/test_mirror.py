"""Each module has a test file of its name, or a line here: which file tests it through a capture."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"

#: Modules that do nothing by themselves, and the test files that reach them. It may only get shorter.
THROUGH = {
    "capture/call_patches.py": "capture/test_common_constructs.py",
    "capture/calls/conversion_calls.py": "capture/test_what_python_does_with_sizes.py",
    "capture/calls/imports.py": "capture/test_chance.py",
    "capture/dynamic_dims.py": "capture/test_capture.py",
    "capture/effects/container_items.py": "capture/test_refilled_containers.py",
    "capture/effects/traced_tables.py": "guards/test_size_tables.py",
    "capture/loops/check.py": "capture/test_loops.py",
    "capture/loops/finder.py": "capture/test_loops.py",
    "capture/loops/loop.py": "capture/test_loops.py",
    "capture/loops/steps.py": "capture/test_loops.py",
    "capture/loops/template.py": "capture/test_loops.py",
    "capture/loops/writer.py": "capture/test_loops.py",
    "capture/numbers/symbolic_numbers.py": "capture/test_data_numbers.py",
    "capture/numbers/tensor_reads.py": "guards/test_tensor_attributes.py",
    "capture/partitioner.py": "runtime/test_parts_of_islands.py",
    "capture/pattern_rewriter.py": "capture/test_patterns.py",
    "capture/randomness/drawn_values.py": "capture/test_draws_as_operands.py",
    "capture/randomness/held_generators.py": "capture/test_chance.py",
    "capture/randomness/held_iterators.py": "capture/test_iterators.py",
    "capture/randomness/process_reads.py": "capture/test_chance.py",
    "capture/scalar_guards.py": "capture/test_data_sizes.py",
    "capture/trace.py": "capture/test_capture.py",
    "capture/trace_comparison.py": "capture/test_reasons.py",
    "capture/trace_mode.py": "capture/test_capture.py",
    "capture/trace_record.py": "capture/test_capture.py",
    "compat/_custom_autograd_function.py": "compat/test_compat.py",
    "compat/gradient_graph.py": "compat/test_old_scripts.py",
    "compat/hooks.py": "compat/test_old_scripts.py",
    "compat/pipeline.py": "zero/test_zero.py",
    "core/structures/dtensor_results.py": "distributed/test_distributed.py",
    "core/structures/leaves.py": "core/test_pytree.py",
    "debug/bisect.py": "debug/test_verify.py",
    "debug/graph_dump.py": "core/test_config.py",
    "debug/memory/peak.py": "test_memory.py",
    "debug/observers.py": "debug/test_verify.py",
    "debug/onnx_operators.py": "debug/test_onnx_interpreter.py",
    "engine/session.py": "engine/test_lookup.py",
    "guards/descriptions.py": "guards/test_guards.py",
    "guards/module_hooks.py": "guards/test_hook_analysis.py",
    "guards/module_tree.py": "guards/test_guards.py",
    "guards/sharding/collectives.py": "distributed/test_distributed.py",
    "guards/sharding/local_parameters.py": "distributed/test_distributed.py",
    "guards/sharding/sharded.py": "integrations/test_sharded.py",
    "guards/writes/holders.py": "capture/test_hidden_containers.py",
    "guards/writes/surroundings.py": "capture/test_side_effects.py",
    "hf.py": "integrations/test_hf.py",
    "host/collectives.py": "distributed/test_distributed.py",
    "host/mesh_layouts.py": "distributed/test_distributed.py",
    "host/met_calls.py": "host/test_opaque_regions.py",
    "host/parallel_layers.py": "distributed/test_distributed.py",
    "host/parallel_rules.py": "distributed/test_distributed.py",
    "host/passed_calls.py": "runtime/test_parts_of_islands.py",
    "lowering/decompose.py": "lowering/test_torch_functions.py",
    "lowering/export.py": "capture/test_export_cache.py",
    "lowering/symbolics.py": "lowering/test_torch_edges.py",
    "runtime/attachments.py": "runtime/test_spine.py",
    "runtime/autograd_bridge.py": "runtime/test_contract.py",
    "runtime/calls/held_arguments.py": "guards/test_same_tensors.py",
    "runtime/variants/lengths.py": "capture/test_loops.py",
    "runtime/calls/module_state.py": "runtime/test_changed_class.py",
    "runtime/compiler.py": "runtime/test_contract.py",
    "runtime/dispatcher.py": "runtime/test_spine.py",
    "runtime/executable.py": "runtime/test_spine.py",
    "runtime/lm_head.py": "runtime/test_lazy_logits.py",
    "runtime/rng_replay.py": "runtime/test_given_generators.py",
    "runtime/tensors/memory_settings.py": "core/test_config.py",
    "trainer/onnx_file.py": "trainer/test_trainer.py",
    "trainer/step_module.py": "trainer/test_trainer.py",
    "triton_kernels/attention_kernels.py": "triton_kernels/test_attention.py",
    "triton_kernels/device_functions.py": "triton_kernels/test_cases.py",
    "triton_kernels/interpreted.py": "triton_kernels/test_cases.py",
    "triton_kernels/source.py": "triton_kernels/test_cases.py",
    "triton_kernels/use.py": "triton_kernels/test_rules.py",
    "optim/amp.py": "optim/test_fp16_optimizer.py",
    "optim/fused.py": "optim/test_fused_optimizers.py",
    "optim/fused_adagrad.py": "optim/test_fused_optimizers.py",
    "optim/fused_lamb.py": "optim/test_fused_optimizers.py",
    "optim/fused_sgd.py": "optim/test_fused_optimizers.py",
    "optim/megatron.py": "optim/test_fp16_optimizer.py",
    "optim/zero.py": "optim/test_sharded_optimizers.py",
}


def modules():
    """Each module that is ours, by its path in the package: the file that its test would be."""
    found = {path.relative_to(ROOT / "ortmodule"): path for path in (ROOT / "ortmodule").rglob("*.py")}
    found |= {path.relative_to(ROOT): path for path in (ROOT / "optim").glob("*.py")}
    for name in found:
        if name.name in ("__init__.py", "__main__.py") or "packages" in name.parts:
            continue  # the last are the original's import paths
        folder = TESTS / name.parts[0] if len(name.parts) > 1 else TESTS
        yield str(name), folder / f"test_{name.name}"


MODULES = dict(modules())


def test_modules_are_found():
    assert len(MODULES) > 200 and MODULES["core/objects/weights.py"] == TESTS / "core" / "test_weights.py"
    assert MODULES["optim/zero.py"].parent == TESTS / "optim" and MODULES["hf.py"].parent == TESTS


@pytest.mark.parametrize("module", MODULES)
def test_it_has_a_test_file(module):
    if MODULES[module].exists():
        assert module not in THROUGH, f"{module} has a test file of its name: it leaves the list"
    else:
        assert module in THROUGH, f"{module} has no test file of its name"


def test_the_others_are_tested():
    assert THROUGH.keys() <= MODULES.keys()
    assert not [path for path in THROUGH.values() if not (TESTS / path).exists()]
