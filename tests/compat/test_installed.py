"""Installs, upgrades and removes ONNX Runtime and ortmodule by pip around the compatible names, in an environment."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import ortmodule

pytestmark = pytest.mark.full
PACKAGE = Path(ortmodule.__file__).parent
OPTIM = next(path for path in (PACKAGE / "optim", PACKAGE.parent / "optim") if path.is_dir())


def wheel(folder, name, version, files):
    """One with these files, {path: bytes}."""
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in (files | {f"{info}/RECORD": record.encode()}).items():
            archive.writestr(inside, content)
    return path


def ours(folder):
    """The package under test, as it would be installed."""
    files = {}
    for root, inside in ((PACKAGE, "ortmodule"), (OPTIM, "ortmodule/optim")):
        for path in root.rglob("*"):
            if path.is_file() and path.suffix not in (".pyc", ".o") and path.parent.name != "__pycache__":
                files[f"{inside}/{path.relative_to(root).as_posix()}"] = path.read_bytes()
    return wheel(folder, "ortmodule", "0.0.1", files)


def imitation(folder, version):
    """An onnxruntime that has the names which scripts look at."""
    text = f"__version__ = {version!r}\ndef get_available_providers(): return ['CPUExecutionProvider']\n"
    return wheel(folder, "onnxruntime", version, {"onnxruntime/__init__.py": text.encode()})


def version_of(wheel):
    return wheel.name.split("-")[1]


def official(folder):
    """The one that is installed beside these tests, as a wheel."""
    try:
        found = metadata.distribution("onnxruntime")
    except metadata.PackageNotFoundError:
        pytest.skip("onnxruntime is not installed: it needs another library")
    kept = [each for each in found.files if each.parts[0] == "onnxruntime" and each.suffix != ".pyc"]
    return wheel(
        folder, "onnxruntime", found.version, {each.as_posix(): Path(each.locate()).read_bytes() for each in kept}
    )


class Environment:
    """A virtual environment with the packages of this one, but for onnxruntime and ortmodule."""

    def __init__(self, folder):
        venv.create(folder / "venv", with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        self.site = next((folder / "venv" / "lib").glob("python3*/site-packages"))
        (folder / "others").mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if not any(name in path.name for name in ("onnxruntime", "ortmodule", "pycache", ".pth")):
                (folder / "others" / path.name).symlink_to(path)
        (self.site / "others.pth").write_text(f"{folder / 'others'}\n")
        self.folder = folder

    def run(self, *arguments):
        """(exit status, what it has printed, errors)"""
        kept = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "ORTMODULE_BUILD")}
        environment = kept | {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [self.python, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    def says(self, text):
        code, out, error = self.run("-c", text)
        assert code == 0, error
        return out.strip()

    def pip(self, command, *arguments):
        """(As a user does it: Python writes what it compiles when it starts, the finder among it.)"""
        line = [sys.executable, "-m", "pip", "--python", self.python, "-q", "--disable-pip-version-check", command]
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        done = subprocess.run([*line, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def install(self, path):
        self.pip("install", "--no-index", "--no-deps", "--no-compile", "--upgrade", str(path))

    def names(self, action):
        code, _, error = self.run("-m", "ortmodule.compat", action)
        assert code == 0, error

    def files(self):
        return {p.relative_to(self.site): p.read_bytes() for p in sorted(self.site.rglob("*")) if p.is_file()}


TRAINS = """if True:
    import torch
    from onnxruntime.training.ortmodule import ORTModule
    model = ORTModule(torch.nn.Linear(3, 2))
    model(torch.ones(2, 3)).sum().backward()
    print(ORTModule.__module__, model.weight.grad.shape)
"""
TRAINED = "ortmodule.module torch.Size([2, 3])"
THEIRS = "import onnxruntime as o; print(o.__version__, 'CPUExecutionProvider' in o.get_available_providers())"


#: What makes a wheel of ONNX Runtime: one that is small, and the one that people install.
each_wheel = pytest.mark.parametrize(
    "newer", [lambda folder: imitation(folder, "1.31.0"), official], ids=["imitation", "official"]
)


@each_wheel
def test_packages_that_come_and_go(newer, tmp_path):
    latest, site = newer(tmp_path), Environment(tmp_path)
    site.install(ours(tmp_path))
    plain = site.files()
    site.names("enable")
    assert site.says(TRAINS) == TRAINED
    for path in (imitation(tmp_path, "1.30.0"), latest):  # installed, upgraded
        site.install(path)
        assert site.says(THEIRS) == f"{version_of(path)} True" and site.says(TRAINS) == TRAINED
        theirs = {name: text for name, text in site.files().items() if name.parts[0] == "onnxruntime"}
        with zipfile.ZipFile(path) as archive:  # nothing was written into it
            inside = {Path(name): archive.read(name) for name in archive.namelist() if name.startswith("onnxruntime/")}
        assert theirs == inside
    site.pip("uninstall", "-y", "onnxruntime")
    assert site.says(TRAINS) == TRAINED and not (site.site / "onnxruntime").exists()
    site.names("disable")
    assert site.files() == plain


@each_wheel
def test_ortmodule_that_is_uninstalled(newer, tmp_path):
    """With the names still on."""
    path, site = newer(tmp_path), Environment(tmp_path)
    site.install(path)
    before = site.files()
    site.install(ours(tmp_path))
    plain = site.files()
    site.names("enable")
    site.names("disable")
    assert site.files() == plain
    site.names("enable")
    assert site.says(TRAINS) == TRAINED
    site.pip("uninstall", "-y", "ortmodule")
    assert site.run("-c", "print('starts')") == (0, "starts\n", "")
    assert site.says(THEIRS) == f"{version_of(path)} True"
    for name in ("torch_ort", "onnxruntime.training", "optimum.onnxruntime"):
        code, _, error = site.run("-c", f"import {name}")
        assert code and "ModuleNotFoundError" in error and "ortmodule" not in error.splitlines()[-1], error
    left = site.files().keys() - before.keys()
    assert {each.name.partition(".")[0] for each in left} == {"ortmodule_compat", "ortmodule_compat_finder"}
    for each in left:  # which are removed by hand
        (site.site / each).unlink()
    assert site.files() == before
