"""Files that others can write are not trusted, symbolic links not followed, and locks do not wait for ever."""

import fcntl
import json
import os
import stat
import time
import warnings

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.capture import export_cache
from ortmodule.core import config
from ortmodule.core.settings import safe_files
from ortmodule.engine import autotune


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "kept"
    made.mkdir(mode=0o700)
    return made


def another_user(monkeypatch):
    """This process is now of a user to whom none of its files belong, root apart: as if others had made them."""
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    real = os.fstat, os.stat

    class Foreign:
        def __init__(self, status):
            self.status = status

        def __getattr__(self, name):
            return 4243 if name == "st_uid" else getattr(self.status, name)

    monkeypatch.setattr(safe_files.os, "fstat", lambda descriptor: Foreign(real[0](descriptor)))
    return Foreign


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_refused(mode, folder, monkeypatch):
    monkeypatch.setattr(safe_files, "_is_own_group", lambda number: False)
    safe_files.check_private(folder)
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="kept: others can write it"):
        safe_files.check_private(folder)
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(folder))
    with pytest.raises(ValueError, match="ORTMODULE_CACHE_DIR=.* only its owner can write, .*chmod go-w"):
        ORTModule(nn.Linear(2, 2))


def test_a_folder_on_the_way_that_others_can_write_is_refused(folder, monkeypatch):
    monkeypatch.setattr(safe_files, "_is_own_group", lambda number: False)
    inner = folder / "inner"
    inner.mkdir(mode=0o700)
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="kept: others can write it"):
        safe_files.check_private(inner)
    folder.chmod(0o1777)  # as /tmp: what is there cannot be replaced by others
    safe_files.check_private(inner)


def test_a_group_of_ones_own_is_no_other_user(folder, monkeypatch):
    folder.chmod(0o770)
    monkeypatch.setattr(safe_files.grp, "getgrgid", lambda number: groups[0])
    monkeypatch.setattr(safe_files.pwd, "getpwuid", lambda number: type("User", (), {"pw_name": "ada"}))
    for members, fine in ((["ada"], True), ([], True), (["ada", "eve"], False)):
        groups = [type("Group", (), {"gr_name": "ada", "gr_mem": members})]
        assert safe_files._is_own_group(7) is fine
    groups = [type("Group", (), {"gr_name": "staff", "gr_mem": []})]
    assert not safe_files._is_own_group(7)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder):
    os.chown(folder, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        safe_files.check_private(folder)


def test_a_missing_folder_is_made_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        safe_files.make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b")] == [0o700, 0o700]


# --- reading ----------------------------------------------------------------------------------------------------------


def test_what_others_may_have_written_is_not_read(folder, monkeypatch):
    file = folder / "file"
    file.write_bytes(b"content")
    file.chmod(0o600)
    assert safe_files.read_private(file) == b"content"
    file.chmod(0o602)
    with pytest.raises(PermissionError, match="file: others can write it"):
        safe_files.read_private(file)
    file.chmod(0o600)
    (folder / "link").symlink_to(file)
    with pytest.raises(OSError, match="symbolic link"):
        safe_files.read_private(folder / "link")
    os.mkfifo(folder / "pipe")
    with pytest.raises(OSError, match="no regular file|not a regular file"):  # and it does not wait for a writer
        safe_files.read_private(folder / "pipe")
    another_user(monkeypatch)
    with pytest.raises(PermissionError, match="belongs to another user"):
        safe_files.read_private(file)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return torch.relu(self.layer(x))


def hits_and_misses():
    torch.manual_seed(0)
    model = ORTModule(Net())
    x = torch.ones(2, 4)
    torch.testing.assert_close(model(x), torch.relu(model.layer(x)))
    assert explain(model).captured
    return model._ortmodule.compiler.cache.hits, model._ortmodule.compiler.cache.misses


@pytest.mark.parametrize("change", ["writable", "link", "pipe"])
def test_a_cached_graph_that_others_may_have_written_is_made_again(change, folder, monkeypatch, caplog):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(folder))
    assert hits_and_misses() == (0, 1)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    if change == "writable":
        file.chmod(0o666)
    else:
        file.rename(folder.parent / "elsewhere")
        file.symlink_to(folder.parent / "elsewhere") if change == "link" else os.mkfifo(file)
    assert hits_and_misses() == (0, 1)
    assert "cannot be used, so the graph is exported again" in caplog.text
    assert hits_and_misses() == (1, 0) and [*folder.iterdir()] == [file]


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_link_in_the_way_is_replaced_and_its_target_left(folder):
    target = folder / "precious"
    target.write_bytes(b"precious")
    (folder / "file").symlink_to(target)
    safe_files.write_whole(folder / "file", b"new")
    assert target.read_bytes() == b"precious" and (folder / "file").read_bytes() == b"new"
    assert not (folder / "file").is_symlink()


def test_tuning_writes_through_no_link(folder):
    """The name that it wrote under was known, and a link of that name was followed."""
    target = folder / "precious"
    target.write_bytes(b"precious")
    file = folder / "results.json"
    for name in (".part", ".lock"):
        file.with_name(file.name + name).symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        autotune._add(file, {"class": {"way": "blas"}})
    file.with_name(file.name + ".lock").unlink()
    autotune._add(file, {"class": {"way": "blas"}})
    assert target.read_bytes() == b"precious" and "blas" in file.read_text()


@pytest.mark.parametrize("private", [False, True])
def test_modes(private, folder):
    file = folder / "file"
    before = os.umask(0o027)
    try:
        safe_files.write_whole(file, b"1", private=private)
        assert stat.S_IMODE(file.stat().st_mode) == (0o600 if private else 0o640)
        file.chmod(0o604)
        safe_files.write_whole(file, b"2", private=private)
        assert stat.S_IMODE(file.stat().st_mode) == (0o600 if private else 0o604)
    finally:
        os.umask(before)
    assert file.read_bytes() == b"2" and [*folder.iterdir()] == [file]


def test_a_failure_leaves_the_old_file_and_nothing_else(folder, monkeypatch):
    safe_files.write_whole(folder / "file", b"old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safe_files.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        safe_files.write_whole(folder / "file", b"new")
    assert [*folder.iterdir()] == [folder / "file"] and (folder / "file").read_bytes() == b"old"


# --- locks ------------------------------------------------------------------------------------------------------------


def test_a_lock_that_is_held_is_not_waited_for_for_ever(folder, monkeypatch):
    monkeypatch.setattr(safe_files, "LOCK_SECONDS", 0.2)
    with open(folder / "lock", "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        sentence = "another process has held the lock .*lock for 0.2 s"
        with pytest.raises(TimeoutError, match=sentence), safe_files.locked(folder / "lock"):
            pass
    with safe_files.locked(folder / "lock"):
        pass


def test_training_goes_on_while_tuning_waits_in_vain(folder, monkeypatch):
    monkeypatch.setattr(safe_files, "LOCK_SECONDS", 0.2)
    monkeypatch.setenv("ORTMODULE_ENABLE_TUNING", "1")
    monkeypatch.setenv("ORTMODULE_TUNING_RESULTS_PATH", str(folder / "results.json"))
    config.warn_once.cache_clear()
    with open(folder / "results.json.lock", "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        began = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = ORTModule(Net())
            model(torch.ones(2, 4)).sum().backward()
    assert time.monotonic() - began < 60 and explain(model).captured
    assert any("another process has held the lock" in str(w.message) for w in caught)


@pytest.mark.parametrize("kind", ["pipe", "device", "link to a pipe"])
def test_tuning_reads_no_pipe_and_no_device(kind, folder):
    """In a folder that others can write they may lie where results should: reading them would never end."""
    file = folder / "results.json"
    if kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        os.mkfifo(folder / "pipe")
        file.symlink_to(folder / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        autotune._add(file, {"class": {"way": "blas"}})


# --- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [400, 900, 100_000])
def test_deep_json_is_a_sentence(depth, folder, monkeypatch):
    """Also where reading it works, and writing it does not."""
    file = folder / "results.json"
    deep = "[" * depth + "]" * depth
    text = '{"results": [{"products": {"class": {"way": "blas", "seconds": ' + deep + "}}}]}"
    file.write_text(text)
    try:
        autotune._add(file, {"new": {"way": "blas"}})
    except ValueError as error:
        assert "nested too deeply" in str(error) and file.read_text() == text
    else:
        assert len(json.loads(file.read_text())["results"]) == 2
    file.write_text('{"LOG_LEVEL": ' + deep + "}")
    monkeypatch.setenv("ORTMODULE_JSON_CONFIG_PATH", str(file))
    with pytest.raises(ValueError, match="results.json: .*(nested too deeply|is a text, a number)"):
        ORTModule(Net())


def test_a_damaged_graph_is_made_again_after_the_check(folder, monkeypatch, caplog):
    """Authorship does not replace the checksum."""
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(folder))
    assert hits_and_misses() == (0, 1)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert hits_and_misses() == (0, 1) and "damaged" in caplog.text
    assert export_cache.MAGIC in file.read_bytes()
