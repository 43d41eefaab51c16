"""Reads WordNet's glosses, each labelled with the lexicographer file it comes from (Debian's package wordnet-base)."""

import random
from collections import Counter
from pathlib import Path

WORDNET = Path("/usr/share/wordnet")
FEWEST = 80  # glosses a category must have

#: Names of the lexicographer files in the order of their numbers, by part of speech.
FILES = (
    ("adj", "all pert"),
    ("adv", "all"),
    (
        "noun",
        "Tops act animal artifact attribute body cognition communication event feeling food group location motive "
        "object person phenomenon plant possession process quantity relation shape state substance time",
    ),
    (
        "verb",
        "body change cognition communication competition consumption contact creation emotion motion perception "
        "possession social stative weather",
    ),
    ("adj", "ppl"),
)
CATEGORIES = [f"{part}.{name}" for part, names in FILES for name in names.split()]


def read_glosses(folder=WORDNET):
    """(gloss, category number) of every synset."""
    rows = []
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text(encoding="utf-8").splitlines():
            if not line.startswith("  "):  # the licence
                synset, _, gloss = line.partition(" | ")
                rows.append((gloss.strip(), int(synset.split()[1])))
    return rows


def load(evaluation=1024, seed=0, folder=WORDNET):
    """Training and evaluation rows of (gloss, class), shuffled, and the names of the classes."""
    rows = read_glosses(Path(folder))
    counts = Counter(category for _, category in rows)
    used = sorted(category for category, count in counts.items() if count >= FEWEST)
    rows = [(gloss, used.index(category)) for gloss, category in rows if category in used]
    random.Random(seed).shuffle(rows)
    return rows[evaluation:], rows[:evaluation], [CATEGORIES[category] for category in used]
