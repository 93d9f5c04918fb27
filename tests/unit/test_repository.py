"""The repository's own pages and settings name what exists: links, paths, commands, checks."""

import datetime
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from servers.installed import PROGRAMS, missing_servers, need

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
FOLDERS = "|".join(
    [path.parent.name for path in ROOT.glob("src/marl_ray/*/__init__.py") if path.parent.name != "runs"]
    + ["src", "tests", "docs", "benchmarks", "jobs", "serve", "cluster"]
)
"""Folders of the repository and packages of the product; `runs/` of a page is what a user's runs leave."""
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")
NAMED = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")
IDENTIFIER = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)`")
WORD = re.compile(r"\w+")
MAKE = re.compile(r"\bmake ([a-z-]+(?: [a-z-]+)*)`")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page):
    for path in NAMED.findall(page.read_text()):
        assert any((ROOT / base / path).exists() for base in ("", "src/marl_ray", page.parent)), path


def test_identifiers_that_the_recipes_name_exist():
    words = {
        word
        for base in ("src", "tests")
        for path in (ROOT / base).rglob("*.py")
        for word in WORD.findall(path.read_text())
    }
    files = {path.name for path in (*ROOT.iterdir(), *(ROOT / "benchmarks").rglob("*"), *(ROOT / "src").rglob("*.py"))}
    named = IDENTIFIER.findall(FENCED.sub("", (ROOT / "CONTRIBUTING.md").read_text()))
    assert [name for name in named if name not in files and not words.issuperset(name.split("."))] == []


def test_a_decision_is_short_has_its_headings_and_is_listed():
    listed = (ROOT / "docs/decisions/README.md").read_text()
    assert len(DECISIONS) >= 4
    for path in DECISIONS:
        text = path.read_text()
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences", "Measured"]
        assert len(text.splitlines()) <= 70
        assert f"]({path.name})" in listed


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_a_date_and_a_status(path):
    title, empty, date, status = path.read_text().splitlines()[:4]
    assert title.startswith(f"# {path.name[:4]}: ") and not empty
    assert (
        datetime.date(2026, 1, 1)
        <= datetime.date.fromisoformat(date.removeprefix("- Date: "))
        <= datetime.datetime.now(datetime.UTC).date()
    )
    assert re.match(r"- Status: (accepted|replaced by \[\d{4}\]\()", status)


def test_the_commands_of_make_that_pages_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for words in MAKE.findall(page.read_text()):
            assert {word for word in words.split() if word.islower()} <= targets, (page.name, words)


def test_commits_are_checked_as_make_check_does():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    checks = (ROOT / "Makefile").read_text().split("\ncheck: install")[1].split("\n\n")[0]
    make_commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in checks.splitlines()[1:]]
    assert [hook["entry"].removesuffix(" --force-exclude") for hook in hooks] == make_commands
    assert all("pre-push" in hook.get("stages", ["pre-push"]) for hook in hooks)
    for hook in (ROOT / ".githooks").iterdir():
        assert hook.stat().st_mode & 0o100


@pytest.mark.parametrize(("name", "status"), [("join", 0), ("joined", 1)])
def test_a_push_is_refused_if_a_test_imports_what_is_not_there(name, status, tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for program, line in (("pre-commit", "exit 0"), ("python", f'exec {sys.executable} "$@"')):
        (tmp_path / ".venv/bin" / program).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / ".venv/bin" / program).chmod(0o700)
    files = [f"tests/{folder}/test_{folder}.py" for folder in ("unit", "integration", "e2e", "docs")]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(f"from shlex import {name}\n\ndef test_own(): {name}([])\n")
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # twice as fast
    done = subprocess.run(
        [ROOT / ".githooks/pre-push"], cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, done.stderr
    assert [file for file in files if f"ERROR {file}" in done.stderr] == (files if status else []), done.stderr


def test_the_workflow_runs_what_ci_runs():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert ".ci/run" in [step.get("run") for step in workflow["jobs"]["run"]["steps"]]
    kinds = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    supported = [kind.rsplit(" :: ", 1)[1] for kind in kinds if kind.startswith("Programming Language")]
    assert workflow["jobs"]["unit"]["strategy"]["matrix"]["python"] == supported
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert isinstance(yaml.safe_load(form.read_text()), dict)


def commands(workflow: str, job: str) -> list[str]:
    """The commands of a job of `.github/workflows`, in order."""
    steps = yaml.safe_load((ROOT / ".github/workflows" / workflow).read_text())["jobs"][job]["steps"]
    return [step["run"] for step in steps if "run" in step]


def test_no_block_of_a_page_is_skipped_because_a_server_is_missing():
    for name, job in (("ci.yml", "docs"), ("nightly.yml", "docs-test")):
        workflow = yaml.safe_load((ROOT / ".github/workflows" / name).read_text())
        environment = workflow.get("env", {}) | workflow["jobs"][job].get("env", {})
        assert environment.get("REQUIRE_SERVERS") == "1", name
        assert commands(name, job) == ["make docs-test"]
        assert {"uses": "./.github/actions/prepare", "with": {"servers": True}} in workflow["jobs"][job]["steps"]


def test_the_shards_of_the_night_run_every_test_once():
    jobs = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]
    paths = [
        path
        for shard in jobs["test-all"]["strategy"]["matrix"]["files"]
        for pattern in shard.split()
        for place in ROOT.glob(pattern)
        for path in ([place] if place.is_file() else place.rglob("test_*.py"))
    ]
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    assert sorted(paths) == sorted(path for folder in folders for path in (ROOT / folder).rglob("test_*.py"))
    assert commands("nightly.yml", "test-all")[-1] == 'make test-all FILES="${{ matrix.files }}"'
    assert commands("nightly.yml", "docs-test")[-1] == "make docs-test"


def test_the_night_asks_that_nine_tenths_of_the_lines_are_run():
    """By the command that the page shows, over all folders of tests; `--fail-under` of coverage has the number."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    command = f'make coverage TESTS="{" ".join(folders)}" FLOOR=90'
    assert commands("nightly.yml", "coverage") == [command]
    assert f"\n{command} " in (ROOT / "docs/development.md").read_text()
    dry = subprocess.run(["make", "-n", "coverage", "FLOOR=90"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "coverage report --sort=cover --fail-under=90 " in dry.stdout


GREEN_RUN = "https://github.com/o/r/actions/runs/7"


@pytest.mark.parametrize(
    ("runs", "compared", "message"),
    [
        (GREEN_RUN, "behind", ""),
        (GREEN_RUN, "identical", ""),
        ("", "behind", "release: expected a successful run of ci.yml for 0f3c, found none"),
        (GREEN_RUN, "ahead", "release: expected a tag on a commit of main, got 0f3c, which is ahead"),
        (GREEN_RUN, "diverged", "release: expected a tag on a commit of main, got 0f3c, which is diverged"),
    ],
)
def test_a_release_is_of_a_commit_of_main_that_passed_ci_and_its_unit_tests(runs, compared, message, tmp_path):
    """The first command asks GitHub; here a program answers in place of GitHub's own."""
    first, *others = commands("release.yml", "build")
    assert {"make check", "make unit"} <= set(others)
    gh = tmp_path / "gh"
    gh.write_text(
        f"#!/bin/sh\ncase \"$*\" in\n*commits/v1.0.0*) echo 0f3c;;\n*'ci.yml --commit 0f3c'*) echo {runs};;\n"
        f"*compare/main...0f3c*) echo {compared};;\nesac\n"
    )
    gh.chmod(0o700)
    names = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GH_REPO": "o/r", "GITHUB_REF_NAME": "v1.0.0"}
    done = subprocess.run(["bash", "-e", "-c", first], env=names, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (int(bool(message)), message)


def test_what_a_test_imports_of_other_tests_is_there():
    """Also for tests that other environments run, which nothing else collects here."""
    tests = ROOT / "tests"
    support = tests / "support"
    shared = {path.stem for path in support.iterdir()}
    missing = []
    for path in tests.rglob("*.py"):
        for module in re.findall(r"^\s*from ([\w.]+) import", path.read_text(), re.MULTILINE):
            if module.split(".")[0] in shared or module.startswith("toy"):
                places = (support / module.replace(".", "/"), path.parent / module.replace(".", "/"))
                if not any(place.with_suffix(".py").exists() or place.is_dir() for place in places):
                    missing.append(f"{path.relative_to(ROOT)}: {module}")
    assert missing == []


def test_hints_name_extras_that_pip_can_install():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = "".join(path.read_text() for path in [*PAGES, *(ROOT / "src").rglob("*.py")])
    named = re.findall(r"""install_hint\(['"]([\w-]+)['"]\)|marl-ray\[([\w-]+)\]'""", sources)
    assert {name for pair in named for name in pair if name} <= {*extras, "NAME"} and len(named) > 10
    listed = (ROOT / "docs/README.md").read_text().partition("\n## Extras\n")[2]
    assert re.findall(r"^\| `([\w-]+)` \|", listed, re.MULTILINE) == [name for name in extras if name != "dev"]


def test_a_test_whose_server_is_missing_is_skipped_with_a_line_in_the_summary_or_fails(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("REQUIRE_SERVERS", raising=False)
    with pytest.raises(pytest.skip.Exception) as skipped:
        need("Redis", "wrk")
    reason = "Redis and wrk is not installed here: `make servers` installs it"
    assert str(skipped.value) == reason
    assert missing_servers([f"Skipped: {reason}", "Skipped: no GPU", reason]) == [f"2 skipped, because {reason}"]
    monkeypatch.setenv("REQUIRE_SERVERS", "1")
    with pytest.raises(pytest.fail.Exception, match="Redis and wrk is not installed here"):
        need("Redis", "wrk")


def test_make_servers_looks_for_every_program_that_tests_need():
    """CI makes them first, and then no test is skipped for one."""
    script = (ROOT / "tests/runner/need_servers.sh").read_text()
    looked_for = set(re.findall(r"has ([\w-]+)", script))
    assert all(looked_for & set(programs) for programs in PROGRAMS.values())
    steps = (ROOT / ".ci/run").read_text()
    assert steps.index("make servers") < steps.index("export REQUIRE_SERVERS=1") < steps.index("make test ")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an archive has no git")
def test_a_tracked_link_leads_to_a_file_of_the_repository():
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    links = [line.split("\t", 1)[1] for line in listed.splitlines() if line.startswith("120000 ")]
    assert [link for link in links if not (ROOT / link).resolve().is_relative_to(ROOT / "src")] == []
