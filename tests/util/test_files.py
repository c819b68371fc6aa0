"""Names, JSON and what else is read from a folder that somebody else wrote."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from perspectron.util.errors import ArtifactError, StorageError
from perspectron.util.files import atomic, locked, parse_json, read_json, safe_join
from tests.refusals import refused


@pytest.mark.parametrize("path", [".", "..", "/", ""])
def test_a_folder_is_not_written_over_by_a_file(path: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").touch()
    with refused(StorageError, Path(path)), atomic(Path(path)) as temporary:
        temporary.touch()
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_names_do_not_lead_out_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    (folder / "sub").mkdir(parents=True)
    (folder / "out").symlink_to(tmp_path)
    (folder / "in").symlink_to("sub")
    (folder / "ring").symlink_to("ring")
    assert safe_join(folder, "a.experts") == folder / "a.experts"
    assert safe_join(folder, "in/b") == folder / "in" / "b"
    names = [
        "",
        "/etc/passwd",
        "..",
        "../a",
        "sub/../../a",
        "./a",
        "a//b",
        "a/",
        "a\\b",
        "..\\a",
        "a\0b",
        "out/a",
        "out",
    ]
    for name in [*names, "ring", "x" * 5000, "\ud800", None, 3, ["a"], b"a"]:
        with refused(ArtifactError, "name"):
            safe_join(folder, name)


def test_json_is_read_from_files_of_some_size(tmp_path: Path) -> None:
    limit = 16 << 20
    (tmp_path / "levels").write_text("[" * 100_000)
    (tmp_path / "long").write_text(" " * limit + "1")
    (tmp_path / "fits").write_text(" " * (limit - 1) + "1")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("levels", "long", "zeros", "pipe", ".", "none"):
        with refused(ArtifactError, tmp_path / name):
            read_json(tmp_path / name, ArtifactError)
    assert read_json(tmp_path / "fits", ArtifactError) == 1
    assert read_json(tmp_path / "long", ArtifactError, limit + 1) == 1


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**64 - 1, 10**20 - 1, 10**30])
def test_files_of_others_may_have_whole_numbers_beyond_64_bits(number: int) -> None:
    assert parse_json(str(number), infinite=True) == float(number)
    with refused(ValueError, 64):
        parse_json(str(number))
    for fits in (2**63 - 1, -(2**63)):
        assert type(found := parse_json(str(fits), infinite=True)) is int and found == fits


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.ENOTSUP])
def test_a_folder_on_a_disk_without_locks_can_be_used(reason: int, tmp_path: Path, monkeypatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path / "run") as held:
        assert os.fstat(held)
