"""Checks the rules of the tree that a compiler does not check: includes, imports, words, first lines."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from scripts import modules_page

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
#: A folder may include itself and folders above it in this list. `ops/op.h` has the operator records, which everything
#: below `graph` may see, `ops/queries.h` what passes may ask of families; the families in `ops/` come after `exec`.
ORDER = [
    "core", "optim", "gemm", "graph", "ops/op.h", "onnx", "shape", "grad", "ops/queries.h", "passes", "plan", "exec",
    "ops", "cuda", "py",
]  # fmt: skip
RECORD_USERS = {"graph"}  # its sources emit nodes, so they read records
SOURCES = sorted(p for p in CSRC.rglob("*.[ch]*") if p.suffix in {".c", ".h", ".cu", ".cuh"})


def level(path: str) -> int:
    return ORDER.index(path) if path in ORDER else ORDER.index(path.split("/")[0])


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(CSRC)))
def test_includes_go_upwards(source):
    own = str(source.relative_to(CSRC))
    folder = own.split("/")[0]
    for included in re.findall(r'^#include "([^"]+)"', source.read_text(), re.M):
        if "/" not in included:  # generated code
            continue
        if included == "ops/op.h" and folder in RECORD_USERS:
            continue
        same = included.split("/")[0] == folder
        assert same or level(included) <= level(own), f"{own} includes {included}, which is below it"


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(CSRC)))
def test_only_py_sees_python(source):
    if source.relative_to(CSRC).parts[0] != "py":
        assert "Python.h" not in source.read_text()


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(CSRC)))
def test_engine_never_aborts_or_prints(source):
    text = re.sub(r"/\*.*?\*/|\"(\\.|[^\"\\])*\"", "", source.read_text(), flags=re.S)
    assert not re.search(r"\b(abort|exit|printf|puts|fputs|perror)\s*\(", text)


QUERIES = "ops/queries.h"


def test_passes_ask_families_through_one_header():
    for source in (CSRC / "passes").glob("*.[ch]"):
        included = set(re.findall(r'^#include "(ops/[^"]+)"', source.read_text(), re.M))
        assert included <= {"ops/op.h", QUERIES}, f"{source.name} includes {included}"


def test_every_query_is_asked_by_a_pass():
    passes = "".join(source.read_text() for source in (CSRC / "passes").glob("*.c"))
    declared = re.findall(r"(\w+)\([^;{}]*\);", without_comments((CSRC / QUERIES).read_text()))
    assert declared
    assert not [name for name in declared if not re.search(rf"\b{name}\b", passes)]


def without_comments(text: str) -> str:
    """Nor strings."""
    return re.sub(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"', "", text, flags=re.S)


DEFINED = re.compile(r"^(?!typedef\b)([A-Za-z_][\w *]*?)\b(\w+)\([^;{}]*\) \{", re.M)
DECLARED = re.compile(r"^[A-Za-z_][^;{}=#]*\([^;{}=]*;", re.M)
MACRO = re.compile(r"^#define (\w+)\((?:.*\\\n)*.*", re.M)


def called(text: str) -> set[str]:
    """Functions and macros, of which neither a structure's members are nor what is only declared."""
    return set(re.findall(r"(?<![\w.>])(\w+)\(", DECLARED.sub("", text)))


def circles(graph: dict) -> list[set]:
    """Nodes that reach each other."""
    reached = {}
    for start in graph:
        reached[start], waiting = set(), [start]
        while waiting:
            for node in graph[waiting.pop()] - reached[start]:
                reached[start].add(node)
                waiting.append(node)
    return [set(c) for c in {frozenset(b for b in reached[a] if a in reached[b]) for a in graph} if len(c) > 1]


def test_circles_are_found():
    assert circles({1: {2}, 2: {3}, 3: {2, 4}, 4: set(), 5: {5}}) == [{2, 3}]


#: Files that call each other: a table of results is made by the very operator that then looks them up.
ALLOWED_CIRCLES = [{"ops/pointwise/lookup.c", "ops/pointwise/pointwise.c"}]


def test_sources_do_not_call_in_circles():
    """What a source calls does not call it back, even through others. Functions in tables of records do not count."""
    texts = {str(p.relative_to(CSRC)): without_comments(p.read_text()) for p in SOURCES}
    macros = {m[1]: called(m[0]) for text in texts.values() for m in MACRO.finditer(text)}
    home, own = {}, {}
    for name, text in texts.items():
        found = DEFINED.findall(text)
        own[name] = {f for words, f in found if any(w == "static" or w.isupper() for w in words.split())}
        if name.endswith(("c", "cu")):
            home |= {f: name for words, f in found if f not in own[name] and not f.isupper()}
    graph = {}
    for name, text in texts.items():
        calls = called(text)
        while more := {inner for macro in calls & macros.keys() for inner in macros[macro]} - calls:
            calls |= more
        graph[name] = {home[f] for f in calls - own[name] if f in home} - {name}
    assert graph["plan/compile.c"], "no calls are found"
    assert [sorted(c) for c in circles(graph) if c not in ALLOWED_CIRCLES] == []


def test_one_openmp_region():
    """Pragmas elsewhere would lose the CPU-specific clone of their function."""
    for source in SOURCES:
        if source.name != "parallel.c":
            assert "omp parallel" not in source.read_text().replace("`#pragma omp parallel`", ""), source


def test_memory_of_a_gpu_is_torchs():
    """Its allocator counts and limits what there is, so nothing here asks the driver for any."""
    for source in SOURCES:
        assert not re.search(r"\b(cuMemAlloc|cuMemCreate|cuMemPool|cudaMalloc)\w*", source.read_text()), source


# --- the Python package -----------------------------------------------------------------------------------------------

#: A package imports itself and those before it; modules at the root may import all.
PACKAGES = ["core", "triton_kernels", "guards", "host", "lowering", "engine", "capture", "runtime", "debug", "utils"]
PACKAGE = ROOT / "ortmodule"
MODULES = sorted(path for name in PACKAGES for path in (PACKAGE / name).rglob("*.py"))


def imports(tree):
    """(package, line) for each import of one of our packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            names = [f"ortmodule.{a.name}" for a in node.names] if node.module == "ortmodule" else [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for first, _, rest in (name.partition(".") for name in names):
            if first == "ortmodule" and rest.partition(".")[0] != "_core":
                yield rest.partition(".")[0], node.lineno


def test_every_package_has_a_place():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == {*PACKAGES, "trainer", "compat"}  # the last two import all, optim and the root, too
    assert (*PACKAGES, "trainer", "compat") == modules_page.PACKAGES
    files = {"__init__.py", "__main__.py", "module.py", "with_loss.py", "memory.py", "hf.py", "not_built.py"}
    assert {path.name for path in PACKAGE.glob("*.py")} == files


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_upwards(module):
    own = PACKAGES.index(module.relative_to(PACKAGE).parts[0])
    for package, line in imports(ast.parse(module.read_text())):
        assert package in PACKAGES[: own + 1], f"{module}:{line} imports ortmodule.{package}, which is below it"


FILES_OF_A_FOLDER = 15  # about a dozen: more are two rooms


def test_folders_are_small():
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir() and "packages" not in path.parts)]
    sizes = {str(f.relative_to(PACKAGE)): len({*f.glob("*.py")} - {f / "__init__.py"}) for f in folders}
    assert not {folder: size for folder, size in sizes.items() if size > FILES_OF_A_FOLDER}


def names_of_modules():
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in MODULES}


def test_modules_import_each_other_one_way():
    """Also inside of a package, the imports for types alone (`if TYPE_CHECKING`) aside."""
    modules = names_of_modules()
    order = TopologicalSorter()
    for name, path in modules.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module.startswith("ortmodule."):
                base = node.module.removeprefix("ortmodule.")
                found = {f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names}
                order.add(name, *(found & modules.keys()))
    assert len(list(order.static_order())) > 150  # raises CycleError, which names the modules


def private_names(tree):
    """(name, line) for each private name that is read of a module of ours, those that stand for PyTorch's own aside."""
    ours = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module.partition(".")[0] != "ortmodule":
            continue
        names = [alias.name for alias in node.names if alias.name != "_core"]
        yield from ((name, node.lineno) for name in names if _is_private(name))
        if node.module != "ortmodule.core.torch_private":
            ours |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        of = node.value if isinstance(node, ast.Attribute) else None
        if isinstance(of, ast.Name) and of.id in ours and _is_private(node.attr) and not of.id[0].isupper():
            yield f"{of.id}.{node.attr}", node.lineno


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


EVERY_MODULE = sorted({*PACKAGE.rglob("*.py"), *(ROOT / "optim").rglob("*.py")})


@pytest.mark.parametrize("module", EVERY_MODULE, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_reads_private_names_of_another(module):
    assert not list(private_names(ast.parse(module.read_text())))


def test_a_private_name_is_found():
    lines = ["from ortmodule.core import pytree", "from ortmodule.core.pytree import _Reader, flatten", "pytree._KINDS"]
    lines += [
        "from ortmodule.core.torch_private import tracer",
        "tracer._map",
        "from ortmodule import _core",
        "_core.x",
    ]
    found = list(private_names(ast.parse("\n".join(lines))))
    assert found == [("_Reader", 2), ("pytree._KINDS", 3)]


#: Beside `module.py`, whose class has the attribute.
FINDS_DISPATCHERS = "ortmodule/core/objects/dispatchers.py"


def test_a_dispatcher_is_found_by_one_function():
    found = set()
    for path in EVERY_MODULE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "_ortmodule":
                found.add(str(path.relative_to(ROOT)))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                found |= {str(path.relative_to(ROOT))} if "'_ortmodule'" in map(ast.unparse, node.args) else set()
    assert found == {"ortmodule/module.py", FINDS_DISPATCHERS}


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_stand_at_the_top(module):
    tree = ast.parse(module.read_text())
    inner = [
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.Lambda))
        for node in ast.walk(function)
    ]
    found = list(imports(ast.Module([node for node in inner if isinstance(node, (ast.Import, ast.ImportFrom))], [])))
    assert not found, f"{module} imports inside of a function: {found}"


# --- words and first lines --------------------------------------------------------------------------------------------

FOLDERS = ["ortmodule", "optim", "csrc", "docs", "scripts", "benchmarks", "examples", "tests"]
#: Say who: the caller, user code, a hook, autograd, another library, a node.
VAGUE = re.compile(
    r"(?<![a-z])((no|some|any|every)body|(no[ _]|some|any|every)one|whoever|whatever[ _]it[ _]is)(?![a-z])",
    re.I,
)
#: Lists of what others named.
NOT_OURS = {"docs/models.md", "docs/ops_torch.md"}
WRITTEN = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".c", ".h", ".cu", ".md", ".sh", ".toml", ".pyi", ""}
    and path.is_file()
    and path != Path(__file__).resolve()
    and "__pycache__" not in path.parts
]
WRITTEN += [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("*.toml")), ROOT / "setup.py"]


def test_text_says_who():
    found = []
    for path in WRITTEN:
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if name not in NOT_OURS and (vague := VAGUE.search(line)):
                found.append(f"{name}:{number}: {vague[0]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("line", ["# Nobody reads it.", "a tensor, whatever it is, ends here", "test_that_nobody_asks"])
def test_a_vague_word_is_found(line):
    assert VAGUE.search(line) and not VAGUE.search("whatever its shape is, a node's results are the caller's")


MOST_WORDS = 20
#: Nouns end as verbs do.
NOUNS = re.compile(r"(Settings|Operators|Results|Tensors|Types|Values|Nodes|Gradients|Sizes|Errors|Figures)\b")


def words_of(text: str) -> int:
    return sum(bool(re.search(r"[^\W\d_]", word)) for word in text.split())


def wrong_with_module(text: str) -> str:
    """What is wrong with the first line of a Python module: it says what the module does, as "Runs the graph"."""
    first, *rest = (ast.get_docstring(ast.parse(text)) or "").split("\n")
    if rest and rest[0]:
        return "the first sentence is not the first line"
    if not first.endswith("."):
        return "no sentence"
    if words_of(first) > MOST_WORDS:
        return f"{words_of(first)} words"
    if not re.match(r"[A-Z][a-z-]*s[:,]? ", first) or NOUNS.match(first):
        return "does not begin with a verb, as in: Runs the graph"
    return ""


def wrong_with_source(name: str, text: str) -> str:
    """What is wrong with the first line of a C file: `/* name.c -- does something`, and a sentence at most."""
    first = re.match(rf"/\* {re.escape(name)} -- (\S.*)", text)
    if first is None:
        return f"does not begin with /* {name} -- "
    words = words_of(first[1].removesuffix("*/").partition(". ")[0])
    if words > MOST_WORDS:
        return f"{words} words"
    return "" if re.match(r"[a-z]+s[:,]? ", first[1]) else "does not begin with a verb, as in: runs the graph"


@pytest.mark.parametrize(
    "module",
    sorted([*PACKAGE.rglob("*.py"), *(ROOT / "optim").glob("*.py")]),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_first_line_of_a_module(module):
    assert not (wrong := wrong_with_module(module.read_text())), f"{module}: {wrong}"


OTHERS = [path for folder in ("tests", "scripts", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("module", sorted(OTHERS), ids=lambda path: str(path.relative_to(ROOT)))
def test_first_line_of_another_file(module):
    """Of a test it is a sentence that the test checks."""
    if module.name == "__init__.py" and not module.read_text():
        return
    states = module.name.startswith("test_") or module == ROOT / "tests" / module.parent.name / "__init__.py"
    wrong = wrong_with_module(module.read_text())
    assert not wrong or (states and "verb" in wrong), f"{module}: {wrong}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(CSRC)))
def test_first_line_of_a_source(source):
    """That of a pass may be the rule itself, which the page of passes shows: x * sigmoid(x)  ->  Swish(x)."""
    wrong, is_pass = wrong_with_source(source.name, source.read_text()), source.match("passes/*.c")
    assert not wrong or (is_pass and "verb" in wrong), f"{source}: {wrong}"


OF_TESTS = sorted(path for path in (ROOT / "tests").rglob("*.[ch]*") if path.suffix in {".c", ".h", ".cu", ".cuh"})


@pytest.mark.parametrize("source", OF_TESTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_first_line_of_a_source_of_tests(source):
    assert not (wrong := wrong_with_source(source.name, source.read_text())), f"{source}: {wrong}"


@pytest.mark.parametrize(
    "wrong, text",
    [
        ("no sentence", '"""Runs the graph"""'),
        ("no sentence", "import ast"),
        ("not the first line", '"""Runs the graph of a module, and what\nelse there is."""'),
        ("21 words", f'"""Runs {"far " * 19}away."""'),
        ("verb", '"""The graph of a module."""'),
        ("verb", '"""Settings of a module."""'),
    ],
)
def test_a_bad_first_line_is_found(wrong, text):
    assert wrong in wrong_with_module(text)
    assert not wrong_with_module('"""Runs a graph."""') and not wrong_with_source("a.c", "/* a.c -- runs a graph. */")
    for bad in ("/* b.c -- runs a graph. */", f"/* a.c -- runs {'a ' * 20}*/", "/* a.c -- the graph. */"):
        assert wrong_with_source("a.c", bad)


#: Words for which docs/glossary.md has others.
RETIRED = [
    "foreign",
    "heard",
    "secretly",
    "told",
    "again",
    "apart",
    "Around",
    "Parts",
    "PARTS",
    "SCORES",
    "Draws",
    "Redraw",
    "PATIENCE",
]
#: Attributes of C's, and of others.
KEPT: set[str] = set()


def names_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node) not in KEPT:
            yield node.attr


#: The same in text, and where: of a loss there are logits, scores are attention's.
RETIRED_IN_TEXT = {
    r"\bscores?\b": ["csrc/ops/losses", "csrc/passes/*loss*", "ortmodule/runtime"],
    r"\b(foreign|secretly|heard)\b": ["csrc", "ortmodule", "optim", "docs"],
}


@pytest.mark.parametrize("words", RETIRED_IN_TEXT)
def test_text_has_the_words_of_the_glossary(words):
    roots = [path for place in RETIRED_IN_TEXT[words] for path in ROOT.glob(place)]
    files = [file for root in roots for file in ([root] if root.is_file() else root.rglob("*"))]
    texts = [file for file in files if file.suffix in {".c", ".h", ".cu", ".py", ".md"}]
    assert len(texts) > 10 and not [str(file) for file in texts if re.search(words, file.read_text())]


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_names_are_those_of_the_glossary(module):
    found = sorted({name for name in names_in(ast.parse(module.read_text())) if name.strip("_") in RETIRED})
    assert not found, f"{module}: {found}"


#: Names that others gave to two things: the first generation's trainer, and Optimum's.
OF_OTHERS = {"ORTTrainer"}


def test_a_class_name_stands_once():
    """Names for one file, with an underscore, aside."""
    found: dict[str, Path] = {}
    for module in [*PACKAGE.rglob("*.py"), *(ROOT / "optim").glob("*.py")]:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in OF_OTHERS:
                assert node.name not in found, f"{node.name} in {module} and {found[node.name]}"
                found[node.name] = module


# --- macros -----------------------------------------------------------------------------------------------------------

MOST_MACRO_LINES = 20
#: Longer ones, ten at most, and why. No kernel's body is one: it stands in a file that is included once for each type
#: (csrc/ops/pointwise/float_and_double.h), where debuggers and sanitizers see its lines.
LONG_MACROS = {
    "TORCH_LIB_FUNCTIONS": "a list of functions in torch's libraries, from which types, names and messages are made",
    "DRIVER_FUNCTIONS": "a list of the driver's functions, from which types and names are made",
    "CONV_FUNCTIONS": "a list of cuDNN's functions, from which types and names are made",
}


def long_macros(text: str) -> dict[str, int]:
    found = re.finditer(r"^[ \t]*#[ \t]*define[ \t]+(\w+)(?:.*\\\n)*.*", text, re.M)
    return {macro[1]: lines for macro in found if (lines := macro[0].count("\n") + 1) > MOST_MACRO_LINES}


def test_macros_are_short():
    found = [
        f"{source}: {name} has {lines} lines"
        for source in SOURCES
        for name, lines in long_macros(source.read_text()).items()
        if name not in LONG_MACROS
    ]
    assert not found, "\n".join(found)


def test_exceptions_are_few_and_needed():
    assert len(LONG_MACROS) <= 10
    assert LONG_MACROS.keys() <= {name for source in SOURCES for name in long_macros(source.read_text())}


def test_a_long_macro_is_found():
    body = " \\\n    x();"
    assert long_macros(f"#define LONG(x){body * 20}\nint a;\n") == {"LONG": 21}
    assert not long_macros(f"#define SHORT(x){body * 19}\n#define NEXT 1\nint a;\n" + "int b;\n" * 30)
