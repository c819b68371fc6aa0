"""Tokens and flags that a folder of transformers adds to its tokenizer.json, as transformers does when it loads one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perspectron.util.errors import DataError
from perspectron.util.files import read_json

FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
CONFIG, MAP, OLD = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
SPACED = ("GPT2Tokenizer", "Qwen2Tokenizer")
"""Classes that put a space before each text as tokenizer_config.json says, whatever tokenizer.json does."""


def completed(value: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The JSON of a tokenizer with the added tokens and flags of the files beside it; itself where they add nothing.
    DataError, naming file and field: damaged, or an id that the token cannot have."""
    vocab = value["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: id for id, (piece, _) in enumerate(vocab)}
    added = {token["content"]: token for token in value.get("added_tokens") or []}
    if not all(type(token.get("id")) is int for token in added.values()):
        return value  # which the library refuses
    ids |= {content: token["id"] for content, token in added.items()}
    changed = dict[str, Any]()
    for field, token in _tokens(folder):
        content, id = token["content"], ids.get(token["content"], max(ids.values(), default=-1) + 1)
        if token.get("id", id) != id:
            raise DataError(f"{folder / field}: {content!r} is token {token['id']}, must be {id}")
        known = changed.get(content) or added.get(content) or {"normalized": not token.get("special")}
        flags = {name: bool(token.get(name, known.get(name, False))) for name in FLAGS}
        changed[content] = {"id": id, "content": content} | flags
        ids[content] = id
    tokens = sorted((added | changed).values(), key=lambda token: int(token["id"]))
    result = value if list(added.values()) == tokens else value | {"added_tokens": tokens}
    config = _object(folder / CONFIG)
    space, kind = config.get("add_prefix_space"), str(config.get("tokenizer_class")).removesuffix("Fast")
    if isinstance(space, bool) and kind in SPACED:
        pre = _spaced(value.get("pre_tokenizer"), space)
        result = result if pre == value.get("pre_tokenizer") else result | {"pre_tokenizer": pre}
    return result


def _tokens(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, content with the flags and id that it gives) of each token, in the order in which they get ids."""
    config = _object(folder / CONFIG)
    listed = config.get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else {}
    for id, token in sorted(((int(id), token) for id, token in listed.items() if id.isdecimal())):
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            yield CONFIG, {**token, "id": id}
    old = {content: id for content, id in _object(folder / OLD).items() if type(id) is int}
    spelled = {token.get("content") for token in listed.values() if isinstance(token, dict)}
    for content, id in sorted(old.items(), key=lambda item: item[1]):
        if content not in spelled:
            yield OLD, {"content": content, "id": id}
    for name, values in ((CONFIG, config), (MAP, _object(folder / MAP))):
        for field in ("additional_special_tokens", "extra_special_tokens"):
            more = values.get(field) or ()
            for token in more.values() if isinstance(more, dict) else more:
                token = token if isinstance(token, dict) else {"content": token}
                if isinstance(token.get("content"), str):
                    flags = {key: flag for key, flag in token.items() if key != "id"}
                    yield name, {**flags, "special": True}


def _object(path: Path) -> dict[str, Any]:
    value = read_json(path, DataError, infinite=True) if path.exists() else {}
    if not isinstance(value, dict):
        raise DataError(f"{path}: must be an object")
    return value


def _spaced(pre: Any, space: bool) -> Any:
    """A pre-tokenizer whose byte-level part puts a space before each text, or none."""
    if not isinstance(pre, dict):
        return pre
    if pre.get("type") == "Sequence":
        return pre | {"pretokenizers": [_spaced(part, space) for part in pre.get("pretokenizers", [])]}
    return pre | {"add_prefix_space": space} if pre.get("type") == "ByteLevel" else pre


def complete(text: str, folder: Path) -> str:
    """`completed` of a text; the same text where nothing is added."""
    value = json.loads(text)
    full = completed(value, folder)
    return text if full is value else json.dumps(full, indent=2, ensure_ascii=False)
