"""What a release is made of agrees with itself."""

import re
import tomllib
from pathlib import Path

import perspectron

ROOT = Path(__file__).parents[1]


def test_the_citation_and_the_changelog_name_the_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [perspectron.__version__]
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest == perspectron.__version__


def test_the_version_of_the_package_is_read_from_its_source():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    source = ROOT / project["tool"]["scikit-build"]["metadata"]["version"]["input"]
    assert f'__version__ = "{perspectron.__version__}"' in source.read_text(encoding="utf-8")


def test_the_workflow_asks_every_python_that_the_package_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [match[1] for match in map(re.compile(r".* :: (3\.\d+)$").match, project["classifiers"]) if match]
    assert f">={named[0]}" == project["requires-python"]
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8")
    (asked,) = re.findall(r"python: \[(.+)\]", workflow)
    assert re.findall(r"[\d.]+", asked) == named and len(named) > 1
    assert ".ci/release dist" in workflow


def test_the_message_of_the_tag_and_the_versions_that_were_run_are_this_release():
    text = (ROOT / "docs" / "release.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\b0\.\d+\.\d+\b", text)) == {perspectron.__version__}
    pinned = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8")
    assert f"torch {re.findall('torch==(.+)', pinned)[0]}" in text


def test_extras_that_contributors_are_told_to_install_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    told = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8") + (ROOT / "docs" / "faq.md").read_text(
        encoding="utf-8"
    )
    named = {
        extra for group in re.findall(r"(?:\.|perspectron)\[([\w,]+)\]'", told) for extra in group.split(",")
    }
    assert {"ci", "dev", "docs"} <= named <= set(project["optional-dependencies"])
