"""Tokens and flags that a folder of transformers adds to its tokenizer.json, as transformers does when it loads one."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from perspectron.util.errors import DataError
from perspectron.util.files import read_object
from perspectron.util.schema import checked

FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
CONFIG, MAP, OLD = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
READ = ("bos_token", "eos_token", "pad_token")
"""Those that `perspectron.data.specials` reads, and refuses where there is no such token."""
SPACED = tuple(f"{kind}Tokenizer" for kind in ("GPT2", "Qwen2", "Qwen3_5", "GPTNeoX", "CodeGen", "Cohere"))
"""Classes that put a space before each text as tokenizer_config.json says, whatever tokenizer.json does."""


class _Token(Struct):
    content: str
    lstrip: bool | UnsetType = UNSET
    rstrip: bool | UnsetType = UNSET
    single_word: bool | UnsetType = UNSET
    normalized: bool | UnsetType = UNSET
    special: bool | UnsetType = UNSET

    def flags(self) -> dict[str, bool]:
        return {name: getattr(self, name) for name in FLAGS if getattr(self, name) is not UNSET}


_Listed = list[str | _Token]


class _Lists(Struct):
    """What is checked here of tokenizer_config.json and special_tokens_map.json."""

    added_tokens_decoder: dict[str, _Token] | None = None
    additional_special_tokens: _Listed | None = None
    extra_special_tokens: _Listed | dict[str, str | _Token] | None = None


def complete(text: str, folder: Path) -> str:
    """The text of a valid tokenizer.json with the added tokens and flags of the files beside it; the same text where
    they add nothing. DataError, naming file and field: damaged, or an id that the token cannot have."""
    value = json.loads(text)
    vocab = value["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: id for id, (piece, _) in enumerate(vocab)}
    added = {token["content"]: token for token in value.get("added_tokens") or []}
    ids |= {content: token["id"] for content, token in added.items()}
    changed, free = dict[str, Any](), max(ids.values(), default=-1) + 1
    for file, token, wanted in _tokens(folder, frozenset(ids)):
        id = ids.get(token.content, free)
        if wanted is not None and wanted != id:
            raise DataError(f"{folder / file}: {token.content!r} is token {wanted}, must be {id}")
        known = changed.get(token.content) or added.get(token.content)
        known = known or {"normalized": token.special is not True}
        flags = {name: known.get(name, False) for name in FLAGS} | token.flags()
        changed[token.content] = {"id": id, "content": token.content} | flags
        ids[token.content], free = id, max(free, id + 1)
    tokens = sorted((added | changed).values(), key=lambda token: int(token["id"]))
    result = value if list(added.values()) == tokens else value | {"added_tokens": tokens}
    config = read_object(folder / CONFIG, DataError)
    space, kind = config.get("add_prefix_space"), str(config.get("tokenizer_class")).removesuffix("Fast")
    if isinstance(space, bool) and kind in SPACED:
        pre = _spaced(value.get("pre_tokenizer"), space)
        result = result if pre == value.get("pre_tokenizer") else result | {"pre_tokenizer": pre}
    return text if result is value else json.dumps(result, indent=2, ensure_ascii=False)


def _tokens(folder: Path, spelled: Collection[str]) -> Iterator[tuple[str, _Token, int | None]]:
    """(file, token, its id where it is said) in the order in which transformers gives ids to new ones: those of
    `added_tokens_decoder`, or else the old file; those with a role; then the further special ones. spelled: by
    tokenizer.json."""
    config, old = read_object(folder / CONFIG, DataError), read_object(folder / OLD, DataError)
    lists: _Lists = checked(config, _Lists, DataError, folder / CONFIG)
    sources = [(CONFIG, config, lists)]
    if lists.added_tokens_decoder is not None:
        listed = {_id(id, folder / CONFIG): token for id, token in lists.added_tokens_decoder.items()}
        yield from ((CONFIG, listed[id], id) for id in sorted(listed))
    else:
        known = sorted((_id(id, folder / OLD), content) for content, id in old.items())
        yield from ((OLD, _Token(content), id) for id, content in known if content)
        named = read_object(folder / MAP, DataError)
        more = {name: value for name, value in named.items() if not config.get(name)}
        sources.append((MAP, more, checked(more, _Lists, DataError, folder / MAP)))
    for file, values, _ in sources:
        for name in (*NAMED, *(name for name in values if name.endswith("_token") and name not in NAMED)):
            value = values.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str) and content and (name not in READ or content in spelled):
                yield file, _Token(content, special=True), None
    for file, _, its in sources:
        extra, further = its.extra_special_tokens, its.additional_special_tokens or []
        tokens = (
            further if extra is None else extra if isinstance(extra, list) else [*extra.values(), *further]
        )
        for token in tokens:
            made = _Token(token) if isinstance(token, str) else token
            if made.content:
                yield file, _Token(made.content, **(made.flags() | {"special": True})), None


def _id(id: Any, path: Path) -> int:
    if isinstance(id, str) and id.isascii() and id.isdecimal() and len(id) < 10:
        return int(id)
    if type(id) is int and 0 <= id < 10**9:
        return id
    raise DataError(f"{path}: id {str(id)[:40]!r} of an added token, must be a whole number ≥ 0")


def _spaced(pre: Any, space: bool) -> Any:
    """A pre-tokenizer whose byte-level part puts a space before each text, or none."""
    if not isinstance(pre, dict):
        return pre
    if pre.get("type") == "Sequence":
        return pre | {"pretokenizers": [_spaced(part, space) for part in pre.get("pretokenizers", [])]}
    return pre | {"add_prefix_space": space} if pre.get("type") == "ByteLevel" else pre
