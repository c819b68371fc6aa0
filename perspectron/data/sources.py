"""Opens what a user names as data: a text, a table, a folder, a pattern, a dataset, or several with weights."""

import glob
from pathlib import Path

from perspectron.data.corpus import Corpus, Joined, Shares, facts, fingerprint
from perspectron.data.hub import PREFIX, open_hub
from perspectron.data.mixture import Mixture, parts_of
from perspectron.data.named import NAMED, open_named
from perspectron.data.records import Fields, Records, is_table, open_table, table_of
from perspectron.data.template import Template
from perspectron.data.texts import HIDDEN, Files, NoText, divide, open_file, walk
from perspectron.errors import DataError

_PATTERN = frozenset("*?[")


def open_corpus(
    source: str, heldout: float = 0.05, *, dev: float = 0.0, template: Template | None = None
) -> Corpus:
    """Open `source` and split off its held-out share (a fraction between 0 and 1) and its dev share.

    `source` is a name in NAMED (`"stdlib"`: the `.py` files of the running Python, tests excluded), a text file, a
    `.jsonl` or `.parquet` file (the string under "text" of each record, or that under FIELD with `PATH#FIELD`), a
    folder (every file in it, hidden ones excluded; `./stdlib` for a folder of that name), a pattern such as
    `texts/*.parquet`, `hf:NAME[:split]` for a dataset, or several of them with weights, `code=0.7:PATH
    prose=0.3:PATH`. Text and JSON lines may be compressed (`.gz`, `.zst`). Files and records go to a split by a hash of
    their relative path, or of a record's text; of a single text file the last `heldout` of its bytes is held out. `dev`
    is taken from what would be trained on: the held-out text is the same without it. With a template every record has a
    prompt and a completion.

    DataError if nothing is there, it holds no text, it is too small to split, or a share is out of bounds.
    """
    if not 0 < heldout < 1:
        raise DataError(f"heldout: {heldout} is not between 0 and 1 (exclusive)")
    if not 0 <= dev < 1 - heldout:
        raise DataError(f"dev: {dev} is not in [0, {1 - heldout:g}), the share that is not held out")
    shares = Shares(heldout, dev)
    try:
        if parts := parts_of(source):
            return Mixture(
                source, [(part, _named(part.name, part.source, shares, template)) for part in parts]
            )
        return _open(source, shares, template)
    except OSError as error:  # of a name that is too long, say
        raise DataError(f"{source[:200]}: cannot be opened ({error.strerror})") from None


def is_encoded(source: str) -> bool:
    """True if it is a folder that `tokenize` wrote."""
    try:
        return (Path(source) / "manifest.json").is_file()
    except (OSError, ValueError):  # too long for a name: several sources, say
        return False


def _named(name: str, source: str, shares: Shares, template: Template | None) -> Corpus:
    """One of several sources; what is wrong with it is said with its name."""
    try:
        if is_encoded(source):
            raise DataError(f"{source}: encoded already; only texts can be mixed")
        return _open(source, shares, template)
    except DataError as error:
        raise DataError(f"source {name}: {error}") from None


def _open(source: str, shares: Shares, template: Template | None) -> Corpus:
    if "://" in source:
        name = source.rstrip("/").rpartition("/")[2] or "FILE"
        raise DataError(f"{source}: a URL; download it first (curl -LO {source}) and give the file, {name}")
    if source in NAMED:
        _require_records(source, template)
        return open_named(source, shares)
    place, field = _field_of(source)
    fields = Fields(field, template)
    if place.startswith(PREFIX):
        return open_hub(place, shares, fields)
    path = Path(place)
    if path.is_dir():
        kind, root = "folder", str(path.resolve())
        return _open_files(source, kind, root, walk(path, HIDDEN), shares, fields)
    if not path.exists() and _PATTERN & set(place):
        files = [
            (name, Path(name)) for name in sorted(glob.glob(place, recursive=True)) if Path(name).is_file()
        ]
        if not files:
            raise DataError(f"{place}: no file fits this pattern")
        return _open_files(source, "pattern", place, files, shares, fields)
    if not path.is_file():
        raise DataError(
            f"{source}: " + ("not a file or folder" if path.exists() else "no such file or folder")
        )
    if is_table(path.name):
        return open_table(path, shares, fields)
    _require_records(source, template)
    return open_file(path, shares)


def _open_files(
    source: str, kind: str, root: str, files: list[tuple[str, Path]], shares: Shares, fields: Fields
) -> Corpus:
    """Files as one corpus: tables by record, the others by file."""
    tables = [(name, path) for name, path in files if is_table(name)]
    texts = [] if fields.template else [file for file in files if not is_table(file[0])]
    field = fields.facts if tables else ()
    lines = [root, str(shares), *field, *(facts(*file) for file in files)]
    identity = fingerprint(f"{kind} of records" if tables else kind, lines)
    if not tables:
        _require_records(source, fields.template)
        return Files(source, identity, shares, divide(source, texts, shares))
    records = Records(
        source, identity, shares, [table_of(path, name, fields) for name, path in tables], fields
    )
    try:
        divided = divide(source, texts, shares)
    except NoText:
        return records.settle()
    return Joined(source, identity, [Files(source, identity, shares, divided), records])


def _require_records(source: str, template: Template | None) -> None:
    if template is not None:
        raise DataError(
            f"{source}: no records; prompts and completions stand in .jsonl, .parquet or a folder of these"
        )


def _field_of(source: str) -> tuple[str, str]:
    """(where it is, the field with the text) of PATH#FIELD."""
    place, mark, field = source.rpartition("#")
    return (place, field) if mark and place and field and not Path(source).exists() else (source, "text")


def absolute(source: str) -> str:
    """A source by its full path, or paths, so that it is found from any folder."""
    if parts := parts_of(source):
        return " ".join(f"{part.name}={float(part.weight):g}:{absolute(part.source)}" for part in parts)
    if source in (*NAMED, "") or "://" in source:
        return source
    place, _ = _field_of(source)
    if place.startswith(PREFIX):
        name, colon, rest = place.removeprefix(PREFIX).partition(":")
        where = str(Path(name).resolve()) if Path(name).is_dir() else name
        return PREFIX + where + colon + rest + source.removeprefix(place)
    return str(Path(source).resolve())


def label(source: str) -> str:
    """A short name of a source, for a folder that is called after it."""
    if parts := parts_of(source):
        return "-".join(part.name for part in parts)
    place = _field_of(source)[0]
    if place.startswith(PREFIX):
        place = place.removeprefix(PREFIX).split(":")[0]
    name = Path(place).name.split(".")[0]
    kept = "".join(c if c.isalnum() or c in "-_ " else "" for c in name)
    return kept or Path(place).parent.name or "run"
