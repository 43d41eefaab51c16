"""Every type of a setting reads what it allows, and says in a sentence what would be right."""

import json
import math

import pytest

from ortmodule import _core
from ortmodule.core.logger import LogLevel
from ortmodule.core.settings import setting_types as types

GOOD = [
    (types.FLAG, "1", True), (types.FLAG, "no", False), (types.FLAG, "True", True),
    (types.AUTO_FLAG, "AUTO", "auto"), (types.AUTO_FLAG, "off", "0"), (types.AUTO_FLAG, "yes", "1"),
    (types.SHARE, "0.25", 0.25), (types.SHARE, "inf", math.inf), (types.SHARE, "0", 0.0),
    (types.BYTES, "8GiB", 8 << 30), (types.BYTES, "500 MB", 500_000_000), (types.BYTES, "1.5kib", 1536),
    (types.BYTES, "1000", 1000), (types.BYTES, "3B", 3),
    (types.LEVEL, "info", LogLevel.INFO),
    (types.number_from(2, 5), "5", 5), (types.number_from(-1), " 7 ", 7),
    (types.version_from(range(17, 21), 9), "12", 17), (types.version_from(range(17, 21), 9), "19", 19),
    (types.one_of("fast", "Slow"), "SLOW", "Slow"),
    (types.some_of("A", "B"), "a | b", frozenset("AB")),
    (types.CLUSTERS, "Gelu+:1:-1, Add+:0:2", "Gelu+:1:-1,Add+:0:2"),
]  # fmt: skip


def name_of(each):
    """The same in every process: the order of a set is not."""
    return "".join(sorted(each)) if isinstance(each, frozenset) else getattr(each, "name", str(each))


@pytest.mark.parametrize("kind, text, value", GOOD, ids=name_of)
def test_reads(kind, text, value):
    found = kind.parse(text)
    assert found == value and type(found) is type(value)


BAD = [
    (types.FLAG, "tru", "is 1 or 0; did you mean TRUE"), (types.FLAG, "2", "is 1 or 0"),
    (types.AUTO_FLAG, "aut", "is auto, 1 or 0"), (types.SHARE, "-1", "the nearest is 0"),
    (types.SHARE, "nan", "is a number from 0"), (types.SHARE, "x", "is a number, as 0.1, or inf"),
    (types.BYTES, "8GB iB", "is a number of bytes"), (types.BYTES, "-1", "is a number of bytes"),
    (types.number_from(2, 5), "6", "from 2 to 5; the nearest is 5"), (types.number_from(2), "1", "the nearest is 2"),
    (types.number_from(2), "2.5", "is a whole number"), (types.version_from(range(17, 21), 9), "8", "nearest is 17"),
    (types.one_of("fast", "slow"), "slwo", "is one of fast, slow; did you mean SLOW"),
    (types.some_of("A", "B"), "A||B", "not an empty name"),
    (types.CLUSTERS, "Gelu+:3:1", "a strategy from 0 to 2"), (types.CLUSTERS, "nothing", "is a JSON file that"),
    (types.FILE, "/no/such/file", "is a file that can be read"), (types.FOLDER, "/no/such", "is a folder that can be"),
    (types.PASSES, "gelu_fusio", "did you mean gelu_fusion"), (types.PASSES, "a,", "takes names of passes"),
]  # fmt: skip


@pytest.mark.parametrize("kind, text, message", BAD, ids=lambda each: getattr(each, "name", str(each)))
def test_says_what_would_be_right(kind, text, message):
    with pytest.raises(ValueError) as caught:
        kind.parse(text)
    assert message in str(caught.value)


def test_names_of_passes():
    two = list(_core.passes())[:2]
    assert types.PASSES.parse("|".join(two)) == types.PASSES.parse(",".join(two)) == {*two}
    with pytest.raises(ValueError, match="takes names of passes"):
        types.PASSES.parse("no_such_pass")


def test_clusters_in_a_file(tmp_path):
    file = tmp_path / "clusters.json"
    file.write_text(json.dumps(["Gelu+:1:-1", "Add+:0:2"]))
    assert types.CLUSTERS.parse(str(file)) == "Gelu+:1:-1,Add+:0:2"
    assert types.wishes_of("Gelu+:1:-1,Add+:0:2") == (("Gelu+", 1, -1), ("Add+", 0, 2))
    file.write_text("{}")
    with pytest.raises(ValueError, match="with a list of texts"):
        types.CLUSTERS.parse(str(file))


def test_private_folders_are_made(tmp_path):
    made = tmp_path / "new"
    assert types.PRIVATE_FOLDER.parse(str(made)) == str(made)
    assert made.stat().st_mode & 0o077 == 0
    made.chmod(0o777)
    with pytest.raises(ValueError, match="only its owner can write"):
        types.PRIVATE_FOLDER.parse(str(made))
