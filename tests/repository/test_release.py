"""What publishes remat agrees with itself: addresses, versions, Pythons, pins, the README's first lines."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import remat_facade
from remat_executor.errors import NEWEST_TORCH, OLDEST_TORCH
from tests.repository import address
from tests.repository.dist import NAMES, relative_links
from tests.repository.first_lines import first_lines

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


def project(name: str) -> dict[str, Any]:
    """What the `pyproject.toml` of a package says about it."""
    found: dict[str, Any] = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())[
        "project"
    ]
    return found


def environment() -> dict[str, Any]:
    """The default environment of `hatch.toml`."""
    found: dict[str, Any] = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]
    return found


def read(path: str) -> Any:
    """A YAML file."""
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_packages_name_their_authors_and_the_address(name: str) -> None:
    """`repository-code` of CITATION.cff is the one address; `hatch run address` writes it."""
    urls = project(name)["urls"]
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} == set(urls)
    assert [] == [url for url in urls.values() if not f"{url}/".startswith(f"{address.address()}/")]
    assert [{"name": "The remat authors"}] == project(name)["authors"]


def test_no_file_names_another_address() -> None:
    """The placeholder stands everywhere or nowhere."""
    if address.address() != address.PLACEHOLDER:
        named = [path for path in address.files() if address.PLACEHOLDER in path.read_text(encoding="utf-8")]
        assert [] == named, "run `hatch run address`"


def test_the_release_refuses_the_placeholder_for_ever() -> None:
    """`hatch run address` changes the workflow's files, but not what this check of it looks for."""
    assert address.PLACEHOLDER not in WORKFLOW.read_text()
    (pattern,) = re.findall(r"! grep -n '(\S+)'", WORKFLOW.read_text())
    assert re.search(pattern, f'Homepage = "{address.PLACEHOLDER}"')
    assert not re.search(pattern, 'Homepage = "https://example.com/remat"')


def test_absolute_links_lead_to_files() -> None:
    """What follows the address is in the repository."""
    link = re.compile(re.escape(address.address()) + r"/blob/main/([\w./-]+)")
    linked = {path for file in address.files() for path in link.findall(file.read_text(encoding="utf-8"))}
    assert {"README.md", "docs/trainers.md"} <= linked
    assert [] == sorted(path for path in linked if not (ROOT / path).exists())


@pytest.mark.parametrize("name", NAMES)
def test_readmes_of_packages_have_no_relative_links(name: str) -> None:
    """They are shown on an index, where such a link leads nowhere."""
    text = (ROOT / "packages" / name / "README.md").read_text(encoding="utf-8")
    assert [] == relative_links(text)
    assert f"pip install remat-{name}" in text


def test_relative_links_are_found() -> None:
    """In line and as references; neither absolute ones nor those within the page."""
    page = "[a](../a.md) [b] [c](https://example.org/c) [d](#d)\n\n[b]: docs/b.md\n[e]: https://example.org\n"
    assert ["../a.md", "docs/b.md"] == relative_links(page)


def test_a_new_address_is_written_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From CITATION.cff into the files that name the old one; a second run changes nothing."""
    monkeypatch.setattr(address, "ROOT", tmp_path)
    settings, page = tmp_path / "packages/graph/pyproject.toml", tmp_path / ".github/a/b.yml"
    for path, text in (
        (tmp_path / "CITATION.cff", "repository-code: https://new.example/r/\n"),
        (
            settings,
            '[project.urls]\nRepository = "https://old.example/r"\nIssues = "https://old.example/r/i"\n',
        ),
        (page, "url: https://old.example/r/blob/main/x.md\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for _ in range(2):
        assert address.main() == 0
        assert "url: https://new.example/r/blob/main/x.md\n" == page.read_text()
        assert 2 == settings.read_text().count("https://new.example/r")


def test_the_readme_begins_with_how_to_install_and_eight_lines() -> None:
    """They are complete: `hatch run dist` runs them with the wheels alone."""
    title, install, *_ = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")
    assert ("# remat", "    pip install remat-facade") == (title, install)
    assert 8 == len([line for line in first_lines().splitlines() if line.strip()])


def test_the_tested_torch_is_the_pinned_one() -> None:
    """The newest is the pin of the tests, the oldest the lower limit of each package that needs torch."""
    assert any(line.startswith(f"torch=={NEWEST_TORCH}.") for line in environment()["dependencies"])
    limits = [line for name in NAMES for line in project(name)["dependencies"] if line.startswith("torch")]
    assert [f"torch>={OLDEST_TORCH}"] * 2 == limits


def test_the_release_tries_every_python_that_packages_name() -> None:
    """Each on the wheels, before anything is published."""
    jobs = read(".github/workflows/release.yml")["jobs"]
    tried = jobs["test"]["strategy"]["matrix"]["python"]
    for name in NAMES:
        versions = [each.rpartition(" ")[2] for each in project(name)["classifiers"] if ":: 3." in each]
        assert tried == versions
    assert ["build", "test"] == jobs["publish"]["needs"]


def test_only_the_job_that_publishes_is_trusted() -> None:
    """It alone may ask for the identity that the index trusts, and it runs no code of the repository."""
    workflow = read(".github/workflows/release.yml")
    assert {"contents": "read"} == workflow["permissions"]
    trusted = [name for name, job in workflow["jobs"].items() if "permissions" in job]
    publish = workflow["jobs"]["publish"]
    assert ["publish"] == trusted
    assert ({"id-token": "write"}, "release") == (publish["permissions"], publish["environment"])
    assert [] == [step for step in publish["steps"] if "run" in step]
    assert "password" not in WORKFLOW.read_text()


@pytest.mark.parametrize("form", ["bug", "question"])
def test_forms_of_issues(form: str) -> None:
    """Each has a name, a description and fields with labels and ids of their own."""
    read_form = read(f".github/ISSUE_TEMPLATE/{form}.yml")
    assert read_form["name"]
    assert read_form["description"]
    fields = {field["id"]: field["attributes"]["label"] for field in read_form["body"]}
    assert len(read_form["body"]) == len(fields)


def test_hooks_have_the_versions_of_hatch() -> None:
    """Of ruff, so that a commit that passes them passes `hatch run lint`."""
    (repo,) = read(".pre-commit-config.yaml")["repos"]
    (pin,) = (line for line in environment()["dependencies"] if line.startswith("ruff"))
    hooks = [hook for hook in repo["hooks"] if hook["id"].startswith("ruff")]
    assert [[pin], [pin]] == [hook["additional_dependencies"] for hook in hooks]


def untidy(content: bytes) -> dict[str, bool]:
    """What each of the two hooks on whitespace would change in a file with this content."""
    return {
        "trailing-whitespace": bool(re.search(rb"[ \t\v\f]+\r?$", content, re.MULTILINE)),
        "end-of-file-fixer": bool(content) and not re.search(rb"[^\r\n](\n|\r\n|\r)\Z", content),
    }


def test_untidy_files_are_found() -> None:
    """Spaces at the end of a line, with any line break; no line break at the end, or several."""
    assert [] == [each for each in (b"", b"a\n b\n", b"a\r\n") if any(untidy(each).values())]
    for content in (b"a \nb\n", b"a\t\r\n", b"a\n \n"):
        assert untidy(content)["trailing-whitespace"], content
    for content in (b"a", b"a\n\n", b"\n", b"a\r\n\r\n"):
        assert untidy(content)["end-of-file-fixer"], content


@pytest.mark.parametrize("hook", untidy(b""))
def test_the_hooks_on_whitespace_change_no_file(hook: str) -> None:
    """In a fresh clone `pre-commit run --all-files` passes. What is left out is read from the settings."""
    config = read(".pre-commit-config.yaml")
    (own,) = (each["exclude"] for each in config["repos"][0]["hooks"] if each["id"] == hook)
    left_out = re.compile(f"{config['exclude']}|{own}")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this folder is no clone, so no file is tracked")
    names = [name for name in listed.stdout.split("\0") if name and not left_out.search(name)]
    paths = [path for name in names if (path := ROOT / name).is_file() and not path.is_symlink()]
    assert len(paths) > 500
    texts = [path for path in paths if b"\0" not in path.read_bytes()]
    assert [] == [path for path in texts if untidy(path.read_bytes())[hook]]


def test_the_citation() -> None:
    """The version and the licence of what users install."""
    citation = read("CITATION.cff")
    assert (remat_facade.__version__, "Apache-2.0") == (citation["version"], citation["license"])
    assert [{"name": "The remat authors"}] == citation["authors"]
