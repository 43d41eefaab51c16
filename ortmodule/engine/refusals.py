"""Lists what NVIDIA's libraries refused on a GPU, and something slower did; `explain` shows it."""

from __future__ import annotations

from ortmodule import _core
from ortmodule.core.logger import Log


class Refusals:
    """What has been refused in this process since it was made. ``count``: how
    often; ``list``: different sentences, as far as they are kept."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._known = (_core.cuda_refusals(0) or (0,))[0]
        self._warned: set[str] = set()
        self.count = 0
        self.list: list[str] = []

    def listen(self) -> None:
        """After a step: what is new. One warning for each library."""
        new = _core.cuda_refusals(self._known)
        if new is None:
            return
        self.count += new[0] - self._known
        self._known = new[0]
        for library, sentence in new[1]:
            if sentence not in self.list:
                self.list.append(sentence)
            if library not in self._warned:
                self._warned.add(library)
                text = f"something slower runs what {library} refused: {sentence} (explain(model) lists all)"
                self._log.warn_once(text)
