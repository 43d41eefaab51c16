"""Writes what a machine with a GPU finds out, as lines of JSON, as soon as it is known."""

import contextlib
import json
import os
import time
from pathlib import Path

MOST_BYTES = 1 << 20  # of a file that is kept as lines


class Journal:
    """Records in a file, oldest first. A last line that was cut off is left out; what is added begins a new one."""

    def __init__(self, path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, kind, **fields):
        """A record of this ``kind``, with the time; returns it."""
        record = {"kind": kind, "time": time.strftime("%Y-%m-%d %H:%M:%S"), **fields}
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return record

    def records(self, kind):
        found = []
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return [record for record in found if record["kind"] == kind]

    def latest(self, kind, key):
        """{what stands at ``key``: the last record of it}, in the order in which they first came."""
        return {record[key]: record for record in self.records(kind)}


class Kept:
    """A folder whose text files live in a journal: a part that was stopped finds them there when it goes on, on another
    machine, too. Of a file that has grown only what is new is written."""

    def __init__(self, journal, part, folder):
        self.journal, self.part, self.folder, self.known = journal, part, Path(folder), {}
        for record in journal.records("file"):
            if record["part"] == part:
                self.known[record["path"]] = self.known.get(record["path"], "")[: record["at"]] + record["text"]
        for name, text in self.known.items():
            file = self.folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def keep(self):
        """Writes down what has changed in the folder."""
        for file in sorted(self.folder.rglob("*")):
            if not file.is_file() or file.stat().st_size > MOST_BYTES:
                continue
            name, text = str(file.relative_to(self.folder)), file.read_text(errors="replace")
            old = self.known.get(name, "")
            if text != old:
                at = len(old) if text.startswith(old) else 0
                self.journal.add("file", part=self.part, path=name, at=at, text=text[at:])
                self.known[name] = text
