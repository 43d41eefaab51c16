"""Says which parameters of a test --full alone takes, which cases --some, and which tests --fast."""

import zlib
from collections import defaultdict
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


#: Of a test with at least so many cases --some takes one of so many; in some folders all: their cases take little, or
#: each is another way of training on several processes.
ONE_OF = {40: 12, 8: 6, 4: 4, 2: 2}
WHOLE = ("distributed", "ops", "project", "trainer", "utils", "zero")
#: The same of these tests, whatever their folder.
OF_TESTS = {
    "tests/capture/test_idioms.py::test_in_the_engine": 1,
    "tests/cuda/test_sass.py::test_families": 1,
    "tests/ops/test_alignment.py::test_unaligned": 3,
    "tests/ops/test_leftovers.py::test_what_is_on_the_stacks_changes_nothing": 4,
    "tests/ops/test_beyond_caches.py::test_pointwise": 2,
}
#: Of tests with MANY cases, all of which the usual build runs, --some takes one of so many with these builds.
OF_BUILDS = {"avx2": 4, "baseline": 4, "sanitized": 4, "sanitized-emulated": 2}
MANY = 40


def one_of(test, cases):
    """--some takes one of so many of the ``cases`` of ``test``; of a test in the ``tests`` folder itself, all."""
    if test in OF_TESTS:
        return OF_TESTS[test]
    folder = test.split("/")[1] if test.count("/") > 1 else ""
    if not folder or folder in WHOLE:
        return 1
    return max((n for least, n in ONE_OF.items() if cases >= least), default=1)


def waiting(names, build=""):
    """Those of ``names`` (all cases of tests that the ordinary run may take) that --some leaves out, drawn by name.
    ``build``: the folder of the build, if it is not the usual one."""
    cases, left = defaultdict(list), set()
    for name in names:
        cases[name.partition("[")[0]].append(name)
    for test, every in cases.items():
        of = one_of(test, len(every)) * (OF_BUILDS.get(build, 1) if len(every) >= MANY else 1)
        drawn = sorted(every, key=lambda name: zlib.crc32(name.partition("[")[2].encode()))
        left.update(drawn[-(-len(every) // of) :])
    return left


#: What waits for --full is shared by so many turns: an ordinary run takes one (--turn).
TURNS = 100


def in_turn(name, turn):
    """Is it the turn of the test ``name``, which waits for --full?"""
    return zlib.crc32(name.encode()) % TURNS == turn % TURNS


#: The sample of --fast: of each test function of these files so many tests, of those without --full, spread evenly.
FAST = {
    "tests/ops/test_ops.py": 3,  # of each family
    "tests/ops/test_random.py": 2,
    "tests/ops/test_views.py": 2,
    "tests/passes/test_passes.py": 8,
    "tests/lowering/test_out_of_factories.py": 1,
    "tests/capture/test_leaves.py": 1,
    "tests/host/test_young.py": 1,
    "tests/debug/test_explain.py": 1,
    "tests/compat/test_samplers.py": 1,
    "tests/utils/test_sampler.py": 1,
    "tests/trainer/test_bad_input.py": 1,
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
#: Folders without a file there: their tests need several processes, another build of the engine, or other libraries, or
#: take long each.
NOT_FAST = ("cuda", "distributed", "fuzz", "gpu", "integrations", "probe", "triton_kernels", "zero")


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
