"""Reads the King James Bible (Debian's package bible-kjv) as one long row of byte-pair tokens."""

import re
import shutil
import subprocess
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer


def read_text():
    """One verse a line, a blank line before every chapter."""
    if not shutil.which("bible"):
        raise SystemExit("The text comes from Debian's package bible-kjv: apt-get install bible-kjv")
    command = ["bible", "-l100000", "gen1:1-rev22:21"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.sub(r"^ +\d+ ", "", printed, flags=re.MULTILINE).strip()


def load(vocabulary=2048, held_out=0.05, text=""):
    """The tokens to train on and those to evaluate on, and the tokenizer, which has seen the former only. ``text``: a
    file in place of the Bible."""
    text = Path(text).read_text(encoding="utf-8") if text else read_text()
    cut = text.index("\n", int(len(text) * (1 - held_out)))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text[:cut].splitlines(keepends=True), vocab_size=vocabulary, show_progress=False)

    def encode(part):
        ids = [i for row in tokenizer.encode_batch(part.splitlines(keepends=True)) for i in row.ids]
        return torch.tensor(ids)

    return encode(text[:cut]), encode(text[cut:]), tokenizer
