"""Opens what a user names as data: a text, a table, a folder, a pattern, a dataset, or several with weights."""

import codecs
import glob
import itertools
from functools import cache
from pathlib import Path

from perspectron.data.corpus import RULE, RULES, Corpus, Joined, Shares, facts, fingerprint
from perspectron.data.hub import PREFIX, open_hub
from perspectron.data.mixture import Mixture, parts_of
from perspectron.data.named import NAMED, open_named
from perspectron.data.records import Fields, Records, Table
from perspectron.data.tables import is_table, open_table, table_of
from perspectron.data.template import Template
from perspectron.data.texts import HIDDEN, Files, NoText, divide, open_file, walk
from perspectron.data.written import Written
from perspectron.util.config import meant_beside
from perspectron.util.errors import DataError

_PATTERN = frozenset("*?[")
_ENCODING = "encoding="


def open_corpus(
    source: str,
    heldout: float = 0.05,
    *,
    dev: float = 0.0,
    template: Template | None = None,
    rule: int = RULE,
    out: Path | None = None,
) -> Corpus:
    """Open `source` and split off its held-out share (a fraction between 0 and 1) and its dev share.

    `source` is a name in NAMED (`"stdlib"`: the `.py` files of the running Python, tests excluded), a text file, a
    `.jsonl`, `.parquet`, `.csv`, `.tsv` or `.json` file (the string under "text" of each record, or that under FIELD
    with `PATH#FIELD`), a folder (every file in it, hidden ones excluded; `./stdlib` for a folder of that name), a
    pattern such as `texts/*.parquet`, `hf:NAME[:split]` for a dataset, or several of them with weights, `code=0.7:PATH
    prose=0.3:PATH`. All but parquet may be compressed (`.gz`, `.zst`), and is UTF-8 unless the source ends with
    `#encoding=NAME` or `#FIELD&encoding=NAME`. Files and records go to a split by a hash of their relative path, or of
    a record's text; of a single text file the last `heldout` of its bytes is held out, and so it is of a file of a
    folder where whole files would not come near a kind's share. `dev` is taken from what would be trained on: the
    held-out text is the same without it, unless a folder has only some hundred characters of text. With a template
    every record has a prompt and a completion. rule: `RULE`, or that by which a text was split once, one of `RULES`. Of
    a folder or a pattern, folders that this program wrote (`Written`) are left out, and so is `out`, that of the
    output.

    DataError if nothing is there, it holds no text, it is too small to split, or a share is out of bounds.
    """
    if not 0 < heldout < 1:
        raise DataError(f"heldout: {heldout} is not between 0 and 1 (exclusive)")
    if not 0 <= dev < 1 - heldout:
        raise DataError(f"dev: {dev} is not in [0, {1 - heldout:g}), the share that is not held out")
    if rule not in RULES or (template is not None and rule != RULE):
        raise DataError(
            f"rule: {rule} is that of another version, which split this otherwise; must be {RULE}, so train again"
        )
    shares, written = Shares(heldout, dev), Written(out)
    try:
        if parts := parts_of(source):
            named = [(part, _named(part.name, part.source, shares, template, written)) for part in parts]
            corpus: Corpus = Mixture(source, named)
        else:
            corpus = _open(source, shares, template, written)
        corpus.apart = written.notes()
        return corpus
    except NoText as error:
        raise NoText("; ".join([str(error), *written.notes()])) from None
    except OSError as error:  # of a name that is too long, say
        raise DataError(f"{source[:200]}: cannot be opened ({error.strerror})") from None


def is_encoded(source: str) -> bool:
    """True if it is a folder that `tokenize` wrote."""
    try:
        return (Path(source) / "manifest.json").is_file()
    except (OSError, ValueError):  # too long for a name: several sources, say
        return False


def _named(name: str, source: str, shares: Shares, template: Template | None, written: Written) -> Corpus:
    """Open one of several sources; errors begin with its name."""
    try:
        return _open(source, shares, template, written)
    except DataError as error:
        raise DataError(f"source {name}: {error}") from None


def _open(source: str, shares: Shares, template: Template | None, written: Written) -> Corpus:
    if "://" in source:
        name = source.rstrip("/").rpartition("/")[2] or "FILE"
        raise DataError(f"{source}: a URL; download it first (curl -LO {source}) and give the file, {name}")
    if source in NAMED:
        _require_records(source, template)
        return open_named(source, shares)
    place, field, encoding = _parts_of(source)
    fields = Fields(field or "text", template)
    if field and template:
        raise DataError(f"{source}: #{field} must be left out: with a template, texts are under {fields}")
    if encoding and (place in NAMED or place.startswith(PREFIX) or is_encoded(place)):
        raise DataError(f"{source}: encoding is {encoding}, must be left out: {place} is no file of bytes")
    if is_encoded(place):
        raise DataError(f"{place}: encoded already; give the text that it was made of")
    if place.startswith(PREFIX):
        return open_hub(place, shares, fields)
    path = Path(place)
    if path.is_dir():
        kind, root = "folder", str(path.resolve())
        if path.resolve() == written.out:
            raise DataError(
                f"out = {place}, must be another folder than that of the text, in it or elsewhere"
            )
        return _open_files(source, kind, root, walk(path, HIDDEN, written), shares, fields)
    if not path.exists() and _PATTERN & set(place):
        begin, apart = (
            Path(*itertools.takewhile(lambda part: not _PATTERN & set(part), path.parts)),
            cache(written),
        )
        files = [
            (name, Path(name))
            for name in sorted(glob.glob(place, recursive=True))
            if Path(name).is_file() and not any(apart(folder) for folder in _below(begin, Path(name)))
        ]
        if not files:
            raise NoText(f"{place}: no file fits this pattern")
        return _open_files(source, "pattern", place, files, shares, fields)
    if not path.is_file():
        what = "not a file or folder" if path.exists() else f"no such file or folder{meant_beside(path)}"
        raise DataError(f"{source}: {what}")
    if is_table(path.name):
        return open_table(path, shares, fields, encoding)
    _require_records(source, template)
    _require_no_field(place, field)
    return open_file(path, shares, encoding)


def _below(begin: Path, file: Path) -> list[Path]:
    """The folders of a file below `begin`."""
    return [folder for folder in file.parents if folder != begin and folder.is_relative_to(begin)]


def _open_files(
    source: str, kind: str, root: str, files: list[tuple[str, Path]], shares: Shares, fields: Fields
) -> Corpus:
    """Files as one corpus: tables by record, the others by file."""
    place, asked, encoding = _parts_of(source)
    tables, texts = list[Table](), list[tuple[str, Path]]()
    for name, path in files:
        if table := _table_in_folder(name, path, fields, encoding):
            tables.append(table)
        elif not fields.template:
            texts.append((name, path))
    field = fields.facts if tables else ()
    lines = [root, str(shares), *field, *(facts(*file) for file in files), *filter(None, [encoding])]
    identity = fingerprint(f"{kind} by kind of records" if tables else f"{kind} by kind", lines)
    if not tables:
        _require_records(source, fields.template)
        _require_no_field(place, asked)
        return Files(source, identity, shares, divide(source, texts, shares, encoding, by_kind=True))
    records = Records(source, identity, shares, tables, fields)
    if asked:
        records.require_text()
    try:
        divided = divide(source, texts, shares, encoding, by_kind=True)
    except NoText:
        return records.settle()
    return Joined(source, identity, [Files(source, identity, shares, divided), records])


def _table_in_folder(name: str, path: Path, fields: Fields, encoding: str) -> Table | None:
    """The records of a file; None for a text, such as a file of a kind in LOOSE that lacks the field."""
    if not is_table(name):
        return None
    try:
        return table_of(path, name, fields, encoding)
    except DataError:
        if is_table(name, loose=False):
            raise
        return None


def _require_no_field(place: str, field: str) -> None:
    if field:
        raise DataError(
            f"{place}#{field}: {field!r} names a field of records, and there are none in {place}: a .jsonl, .parquet, "
            f".csv, .tsv or .json has them; leave #{field} out to read the text as it stands"
        )


def _require_records(source: str, template: Template | None) -> None:
    if template is not None:
        raise DataError(
            f"{source}: no records; prompts and completions stand in .jsonl, .parquet, .csv, .json or a folder of these"
        )


def _parts_of(source: str) -> tuple[str, str, str]:
    """(where it is, the field with the text, its encoding) of PATH#FIELD&encoding=NAME; "" where they are not given.
    DataError for an encoding that Python does not have."""
    place, mark, rest = source.rpartition("#")
    if not (mark and place and rest) or Path(source).exists():
        return source, "", ""
    field, _, encoding = rest.rpartition(_ENCODING) if _ENCODING in rest else (rest, "", "")
    return place, field.removesuffix("&"), _known(encoding) if encoding else ""


def _known(encoding: str) -> str:
    """The name of an encoding as Python has it; "" for UTF-8."""
    try:
        "".encode(encoding)
        name = codecs.lookup(encoding).name
        codecs.getincrementaldecoder(encoding)()
    except (LookupError, ValueError):
        raise DataError(
            f"encoding = {encoding[:80]!r}, must be one that Python has, such as utf-16, latin-1, cp1252 or shift_jis"
        ) from None
    return "" if name == "utf-8" else name


def with_encoding(source: str, encoding: str) -> str:
    """A source with the encoding of its files added; unchanged for "". DataError for a source that names another."""
    if not encoding:
        return source
    if parts := parts_of(source):
        return " ".join(str(part._replace(source=with_encoding(part.source, encoding))) for part in parts)
    place, field, its = _parts_of(source)
    if its and its != _known(encoding):
        raise DataError(f"encoding = {encoding!r}, must be left out: {source} names {its}")
    if not _known(encoding):
        return source
    return f"{place}#{field}{'&' if field else ''}{_ENCODING}{_known(encoding)}"


def absolute(source: str) -> str:
    """A source with full paths, so that it is found from any folder."""
    if parts := parts_of(source):
        return " ".join(str(part._replace(source=absolute(part.source))) for part in parts)
    if source in (*NAMED, "") or "://" in source:
        return source
    place, *_ = _parts_of(source)
    if place in NAMED:
        return source
    if place.startswith(PREFIX):
        name, colon, rest = place.removeprefix(PREFIX).partition(":")
        where = str(Path(name).resolve()) if Path(name).is_dir() else name
        return PREFIX + where + colon + rest + source.removeprefix(place)
    return str(Path(source).resolve())


def label(source: str) -> str:
    """A short name of a source, for a folder that is called after it."""
    if parts := parts_of(source):
        return "-".join(part.name for part in parts)
    place = _parts_of(source)[0]
    if place.startswith(PREFIX):
        place = place.removeprefix(PREFIX).split(":")[0]
    name = Path(place).name.split(".")[0]
    kept = "".join(c if c.isalnum() or c in "-_ " else "" for c in name)
    return kept or Path(place).parent.name or "run"
