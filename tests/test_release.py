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


def test_extras_that_contributors_are_told_to_install_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    told = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8") + (ROOT / "docs" / "faq.md").read_text(
        encoding="utf-8"
    )
    named = {
        extra for group in re.findall(r"(?:\.|perspectron)\[([\w,]+)\]'", told) for extra in group.split(",")
    }
    assert {"test", "dev", "docs"} <= named <= set(project["optional-dependencies"])
