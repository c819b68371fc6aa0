"""Datasets of the Hugging Face Hub or of a folder, streamed through `datasets`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perspectron.data.corpus import Corpus, Shares, fingerprint
from perspectron.data.reading import library
from perspectron.data.records import Fields, Records, require_columns
from perspectron.util.errors import DataError

PREFIX = "hf:"
SAVED = ("state.json", "dataset_dict.json")
"""Files of a folder that `save_to_disk` wrote."""


def open_hub(source: str, shares: Shares, fields: Fields) -> Corpus:
    """The rows of `hf:NAME`, `hf:NAME:SPLIT` or `hf:NAME:CONFIG:SPLIT`; NAME may be a folder, and the split is "train"
    unless it is given. DataError: `datasets` is not installed, there is no such dataset, split or column."""
    name, *rest = source.removeprefix(PREFIX).split(":")
    if not name or len(rest) > 2:
        raise DataError(f"{source}: must be hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    library("datasets", source)
    try:
        stream, identity = _opened(name, rest[0] if len(rest) == 2 else None, rest[-1] if rest else "train")
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
    ) as error:  # what `datasets` raises derives from these
        raise DataError(f"{source}: cannot be opened ({' '.join(str(error).split())})") from None
    columns = stream.column_names or list(next(iter(stream), {}))
    require_columns(source, columns, fields)
    facts = [source, str(shares), *fields.facts, identity]
    rows = Rows(source, stream.select_columns(list(fields.columns(columns))))
    return Records(source, fingerprint("hf by text", facts), shares, [rows], fields).settle()


def _opened(name: str, config: str | None, split: str) -> tuple[Any, str]:
    """(the rows of a split as a stream, a text that identifies them)."""
    import datasets

    if any((Path(name) / file).is_file() for file in SAVED):
        saved = datasets.load_from_disk(name)
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise ValueError(f"split {split!r} is not one of {', '.join(saved)}")
            saved = saved[split]
        return saved.to_iterable_dataset(), saved._fingerprint
    builder = datasets.load_dataset_builder(name, config)
    data_files = getattr(builder.config, "data_files", None) or {}
    files = {str(part): list(map(str, its.origin_metadata)) for part, its in data_files.items()}
    identity = json.dumps([builder.config_id, builder.hash, str(builder.config.version), files])
    return builder.as_streaming_dataset(split=split), identity


class Rows:
    """Rows of a streamed dataset."""

    size = 0.0

    def __init__(self, name: str, stream: Any) -> None:
        self.name = name
        self._stream = stream

    def records(self) -> Iterator[tuple[int, Any, float]]:
        try:
            for number, record in enumerate(self._stream, 1):
                yield number, record, 0.0
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(f"{self.name}: cannot be read ({' '.join(str(error).split())})") from None
