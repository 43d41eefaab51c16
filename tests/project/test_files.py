"""Changelog, version, workflows, templates and pre-commit's settings, held against the tree; no half-merged files."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"

pytestmark = pytest.mark.skipif(not GITHUB.exists(), reason="the sources are not there")


# --- changelog --------------------------------------------------------------------------------------------------------


def test_changelog():
    """Unreleased, then versions from the newest on, each with its day; the newest is that of pyproject.toml."""
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heads[0] == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", head).groups() for head in heads[1:]]
    assert released == sorted(released, key=lambda r: tuple(map(int, r[0].split("."))), reverse=True)
    assert released[0][0] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_kinds_of_changes():
    kinds = set(re.findall(r"^### (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_versions_that_get_fixes():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"| {version.rpartition('.')[0]} | yes |" in (ROOT / "SECURITY.md").read_text()


# --- workflows --------------------------------------------------------------------------------------------------------

WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_only_call_scripts(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    ran = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert ran
    for command in ran:
        script = re.fullmatch(r"(?:[A-Z]+=\S+ )*(scripts/[\w-]+)(?: .*)?", command)
        assert script and (ROOT / script[1]).stat().st_mode & 0o111, command


def test_workflows_have_the_torch_that_the_tests_are_for():
    jobs = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text())["jobs"]
    versions = [str(row["torch"]) for row in jobs["versions"]["strategy"]["matrix"]["include"]]
    assert re.search(r"^TORCH=(\S+)", (ROOT / "scripts" / "common.sh").read_text(), re.M)[1] in versions
    least = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert any(version.startswith(f"{least}.") for version in versions)


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_issue_templates(path):
    template = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert template == {"blank_issues_enabled": True}
        return
    assert template["name"] and template["description"] and template["labels"]
    for field in template["body"]:
        assert field["type"] in ("textarea", "input", "markdown", "dropdown", "checkboxes")
        assert re.fullmatch(r"[a-z]+", field["id"]) and field["attributes"]["label"]


# --- pre-commit -------------------------------------------------------------------------------------------------------


def test_pre_commit_runs_what_the_stages_run():
    """Local programs, of the versions in scripts/requirements.txt."""
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    hooks = {hook["id"]: hook for hook in repos[0]["hooks"]}
    assert hooks.keys() == {"ruff", "ruff-format", "clang-format", "mypy"}
    pinned = (ROOT / "scripts" / "requirements.txt").read_text()
    for program in ("ruff", "clang-format", "mypy"):
        assert re.search(rf"^{program}==", pinned, re.M)
    assert all(hook["language"] == "system" for hook in hooks.values())
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for name in ("clang-format", "mypy"):
        matched = [file for file in files if re.search(hooks[name]["files"], file)]
        assert not files or len(matched) > 50, name


# --- merges -----------------------------------------------------------------------------------------------------------


def test_no_file_is_half_merged():
    """A marker is a line of its own; a row of seven equals signs alone may underline a heading."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    found = subprocess.run(
        ["git", "grep", "-nIE", r"^(<{7}|>{7}|\|{7})( |$)"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1, found.stdout + found.stderr
