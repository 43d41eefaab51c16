"""Runs one script or module in several processes, as the ranks of one group."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 150  # that the processes may take


def package_path():
    """PYTHONPATH of a process that is to import the package which is tested, and these tests."""
    return os.pathsep.join(
        [os.environ.get("ORTMODULE_BUILD") or str(ROOT), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )


def texts_of_two(script, folder, *arguments):
    """What each of two processes prints, both ending well. `script`: its text; it finds in sys.argv its rank, a file
    for the group to meet in, and `arguments`."""
    path = folder / "worker.py"
    path.write_text(script)
    return texts_of_ranks(str(path), folder, *arguments)


def texts_of_ranks(what, folder, *arguments, imports=("ortmodule.optim",), seconds=SECONDS, ranks=2):
    """The same of a script's path or a module's name. ``imports``: what one process imports before it becomes the
    ranks (tests/fork_ranks.py)."""
    environment = os.environ | {"PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    store = folder / "store"
    store.unlink(missing_ok=True)  # where those of another attempt have met
    start = [sys.executable, "-m", "tests.fork_ranks", str(ranks), str(folder), ",".join(imports), what, str(store)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*start, *arguments], env=environment, start_new_session=True, **pipes) as started:
        try:
            said = started.communicate(timeout=seconds)[0]
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(started.pid, signal.SIGKILL)
    found = [folder / f"rank-{rank}" for rank in range(ranks)]
    texts = [path.read_text() if path.exists() else "" for path in found]
    assert started.returncode == 0, [said, *(text[-3000:] for text in texts)]
    return texts
