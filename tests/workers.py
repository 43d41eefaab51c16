"""Processes that run one script, as the ranks of one group."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 150  # that they may take


def texts_of_two(script, folder, *arguments):
    """What each of two processes prints, both ending well. `script`: its text; it finds in sys.argv its rank, a file
    for the group to meet in, and `arguments`."""
    path = folder / "worker.py"
    path.write_text(script)
    return texts_of_ranks([str(path)], folder, *arguments)


def texts_of_ranks(start, folder, *arguments, seconds=SECONDS, ranks=2):
    """The same of a script or a module; ``start``: how Python is told which."""
    places = os.pathsep.join([os.environ.get("ORTMODULE_BUILD") or str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    (folder / "store").unlink(missing_ok=True)  # where those of another attempt have met
    workers = [
        subprocess.Popen([sys.executable, *start, str(rank), str(folder / "store"), *arguments], env=environment,
                         text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        texts = [worker.communicate(timeout=seconds)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * ranks, texts
    return texts
