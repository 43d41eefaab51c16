"""Which parameters of a test the ordinary run takes (--full takes all), and which tests --fast does."""

from collections.abc import Callable

import pytest


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
