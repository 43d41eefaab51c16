"""Reads and writes files that no other user of the machine can have written.

What OpenSSH asks of its keys is asked of files that the engine keeps for later runs: a file, and each folder on the way
to it, belongs to this user or to root, and only its owner can write it. As in Debian, a group that has the user's name
and no other members is no other user. The sticky bit (as on ``/tmp``) is enough for a folder on the way, since others
cannot replace what is not theirs there. A file is read only if all this holds for the file that was opened, a symbolic
link is never followed to it, and what is written appears whole or not at all.
"""

from __future__ import annotations

import fcntl
import grp
import json
import os
import pwd
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

#: Seconds to wait for another process that holds a lock.
LOCK_SECONDS = 10.0


def _fault(status: os.stat_result, on_the_way: bool = False) -> str:
    """Why others may have written what this is the status of, or ""."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user (uid {status.st_uid})"
    if on_the_way and status.st_mode & stat.S_ISVTX:
        return ""
    by_group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    return "others can write it; chmod go-w takes that away" if by_group or status.st_mode & stat.S_IWOTH else ""


def _is_own_group(number: int) -> bool:
    """Whether a group has the name of this user, and no other members."""
    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == name and not set(group.gr_mem) - {name}


def check_private(folder: str | os.PathLike[str]) -> None:
    """Raises PermissionError, which names the folder at fault, if another user could put a file into ``folder``."""
    here = Path(folder).resolve(strict=True)
    for place in (here, *here.parents):
        fault = _fault(place.stat(), on_the_way=place != here)
        if fault:
            raise PermissionError(f"{place}: {fault}")


def make_private(folder: str | os.PathLike[str]) -> None:
    """Makes a folder, and those on the way to it that are missing, for this user alone, then checks it.

    Raises PermissionError as ``check_private`` does, and OSError for a folder that cannot be made.
    """
    missing = [place for place in (Path(folder), *Path(folder).parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)


def read_private(path: str | os.PathLike[str]) -> bytes:
    """The content of a file that only this user, or root, can have written.

    Raises FileNotFoundError; PermissionError for a file that others may have written; OSError for what is no regular
    file, a symbolic link included.
    """
    with _regular(path, os.O_NOFOLLOW) as file:
        fault = _fault(os.fstat(file.fileno()))
        if fault:
            raise PermissionError(f"{path}: {fault}")
        return file.read()


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The content of a file that others may have written.

    Raises OSError, also for a pipe or a device: reading these may never end.
    """
    with _regular(path) as file:
        return file.read()


@contextmanager
def _regular(path: str | os.PathLike[str], flags: int = 0) -> Iterator[BinaryIO]:
    # O_NONBLOCK: opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        yield file


@contextmanager
def replacing(path: str | os.PathLike[str], *, private: bool = False, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which is put in place of ``path`` at once when all is written, or removed after an exception.

    It has a name of its own until then, ``.<name>.<letters>.part``, which nothing else can have made or linked to
    something else. ``private``: only this user can read it; otherwise it has the mode of the file that it replaces, or
    that of a new file. ``durable``: it is on the disk before it takes that place, and then its name is, too. Raises
    OSError.
    """
    path = Path(path)
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with open(descriptor, "wb") as file:
            if not private:
                os.fchmod(descriptor, _mode_of(path))
            yield file
            if durable:
                file.flush()
                os.fsync(descriptor)
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.unlink(part)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_whole(path: str | os.PathLike[str], content: bytes, *, private: bool = False) -> None:
    """Puts a file with ``content`` in place of ``path`` at once, as :func:`replacing` does."""
    with replacing(path, private=private) as file:
        file.write(content)


def _mode_of(path: Path) -> int:
    """The permissions of the file at ``path``, or of one that is made now."""
    try:
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            return stat.S_IMODE(status.st_mode)
    except OSError:
        pass
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


@contextmanager
def locked(path: str | os.PathLike[str], seconds: float | None = None) -> Iterator[None]:
    """Inside, this process alone holds the lock that the file ``path`` stands for; the file is made, and stays.

    Raises TimeoutError when another process holds it for longer than ``seconds`` (LOCK_SECONDS), and OSError for a
    file that cannot be opened, a symbolic link included.
    """
    limit = LOCK_SECONDS if seconds is None else seconds
    deadline = time.monotonic() + limit
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"another process has held the lock {path} for {limit:g} s") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)  # and with it the lock


#: What json raises as a RecursionError.
_TOO_DEEP = "its objects and lists are nested too deeply"


def parse_json(text: str) -> Any:
    """``json.loads``; ValueError, too, for what is nested deeper than Python's stack allows."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def json_bytes(value: Any) -> bytes:
    """``value`` as JSON with indentation, in UTF-8. Raises ValueError for what is nested too deeply."""
    try:
        return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
