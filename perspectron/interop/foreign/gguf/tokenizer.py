"""The tokenizer of a GGUF as files of a transformers folder: tokenizer.json for the tokenizers library, the tokens that
begin and end a text, and the chat template.

It gives the same ids as llama.cpp. A GGUF does not say whether text is normalised first, as some models were trained,
so here it is not.
"""

import json
import re
from typing import Any

from perspectron.data import world
from perspectron.data.template import TOOLS
from perspectron.interop.foreign.gguf.container import Container
from perspectron.util.errors import DataError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = (rf"[\p{{{kind}}}\p{{Lm}}\p{{Lo}}\p{{M}}]" for kind in (r"Lu}\p{Lt", "Ll"))
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Tekken's pattern as in its models; llama.cpp's has only A to Z as capitals, and marks in no word."""
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2 = [{**_BYTES, "use_regex": True}]
_DIGITS = [{"type": "Digits", "individual_digits": True}, *_GPT2]


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTES, "use_regex": False}]


_WHOLE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken")
"""Pre-tokenizers under which a word that is a token stays one, whatever the merges say, and BOS begins a text."""
SPLITS = {
    **dict.fromkeys(("gpt-2", "olmo", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    **dict.fromkeys((*_WHOLE, "dbrx", "smaug-bpe"), _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _split(_QWEN2)),
    "qwen35": _split(_QWEN35),
    "tekken": _split(_TEKKEN),
}
"""Pre-tokenizers by `tokenizer.ggml.pre`."""
SURELY = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>",
    "<|end_of_text|>", "<end_of_utterance>",
)  # fmt: skip
"""Tokens that end a text, as llama.cpp knows them, beside those that the metadata names."""
ENDS = ("</s>", "<eos>")
"""The same where the file calls them control tokens: to Gemma "</s>" is HTML."""

LONGEST = 1024
"""Most characters of a SentencePiece token, as every split of it is tried."""
ROLES = ("bos_token_id", "eos_token_id", "pad_token_id")
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
"""Takes tokenizer.json as it is, where classes of families split texts as their first models did."""


class _Metadata:
    """The metadata of the tokenizer."""

    def __init__(self, container: Container) -> None:
        self.container, self.values = container, container.metadata
        self.tokens: list[str] = self.list("tokens", str)
        self.count = len(self.tokens)
        self.kinds: list[int] = self.list("token_type", int) or [NORMAL] * self.count
        self.ids = {token: id for id, token in enumerate(self.tokens)}
        if len(self.ids) < self.count:
            twice = next(token for id, token in enumerate(self.tokens) if self.ids[token] != id)
            raise self.error("tokens", f"{twice!r} twice")

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(f"tokenizer.ggml.{name}", default)

    def list(self, name: str, kind: type) -> list[Any]:
        """A list of `kind`, empty if missing; one item per token, but for tokens and merges. DataError: it is not."""
        value = self.get(name, [])
        right = isinstance(value, list) and all(type(each) is kind for each in value)
        if not right or (name not in ("tokens", "merges") and value and len(value) != self.count):
            raise self.error(name, "a value", f"a list of {kind.__name__}, one for each token")
        return value

    def id(self, name: str, default: int | None = None) -> int | None:
        """The id of the token with this role, or None. DataError: not an id."""
        value = self.get(f"{name}_token_id", default)
        if value is None or (value == 2**32 - 1):
            return None
        if type(value) is not int or not 0 <= value < self.count:
            raise self.error(f"{name}_token_id", repr(value), f"in 0 … {self.count - 1}")
        return value

    def error(self, name: str, value: str, must: str = "different ones") -> DataError:
        return DataError(f"{self.container.path}: tokenizer.ggml.{name} is {value}, must be {must}")


def files(container: Container) -> dict[str, dict[str, Any]]:
    """The tokenizer's files of a transformers folder, by name. DataError, naming the file and the field: an unknown
    tokenizer or pre-tokenizer."""
    data = _Metadata(container)
    kind, pre = data.get("model"), data.get("pre")
    if not isinstance(kind, str) or kind not in ("gpt2", "llama", "rwkv"):
        raise data.error("model", repr(kind), "'gpt2', 'llama' or 'rwkv' to be read")
    if not data.tokens:
        raise data.error("tokens", "missing", "a list")
    if kind == "gpt2" and (not isinstance(pre, str) or pre not in SPLITS):
        raise data.error("pre", repr(pre), f"one of {', '.join(SPLITS)} to be read")
    if data.get("add_eos_token"):
        raise data.error("add_eos_token", "true", "false to be read")
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {}
    roles = {name: data.id(name, defaults.get(name)) for name in ("bos", "eos", "unknown", "padding")}
    first = bool(data.get("add_bos_token", kind == "llama" or pre in _WHOLE)) and roles["bos"] is not None
    named = (roles["eos"], data.id("eot"), data.id("eom"))
    spelled = (data.ids[end] for end in ENDS if end in data.ids and data.kinds[data.ids[end]] == CONTROL)
    surely = (data.ids[end] for end in SURELY if end in data.ids)
    stops = list(dict.fromkeys(id for id in (*named, *surely, *spelled) if id is not None))
    ends = stops[0] if len(stops) == 1 else stops or None
    if kind == "rwkv":
        return _world(data, roles, ends)
    for id in stops:
        if len(data.tokens[id]) > 1:  # whatever the file says, as in llama.cpp
            data.kinds[id] = CONTROL
    made = _spm(data, roles["unknown"]) if kind == "llama" else _bpe(data, str(pre))
    added = [
        {"id": id, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": data.kinds[id] != USER_DEFINED}
        for id, token in enumerate(data.tokens) if data.kinds[id] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]  # fmt: skip
    spellings = {
        f"{name}_token": None if id is None else data.tokens[id]
        for name, id in zip(("bos", "eos", "unk", "pad"), roles.values(), strict=True)
    }
    template = {"chat_template": text} if (text := container.metadata.get("tokenizer.chat_template")) else {}
    if template and (tools := container.metadata.get(f"tokenizer.chat_template.{TOOLS}")):
        several = {"default": text, TOOLS: tools}
        template = {"chat_template": [{"name": name, "template": one} for name, one in several.items()]}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **made}
    return {
        "tokenizer.json": whole | {"post_processor": _begins(roles["bos"], data) if first else None},
        "tokenizer_config.json": {**CLASS, "add_bos_token": first, **spellings, **template},
        "generation_config.json": dict(zip(ROLES, (roles["bos"], ends, roles["padding"]), strict=True)),
    }


_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r"}
_WORLD_CHAT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}User: {{ message['content'] | trim }}\n\nAssistant:"
    "{% else %}{{ message['content'] | trim }}\n\n{% endif %}{% endfor %}"
)
"""The chat template that llama.cpp calls rwkv-world."""


def _world(data: _Metadata, roles: dict[str, int | None], ends: Any) -> dict[str, dict[str, Any]]:
    """RWKV's World vocabulary, whose tokens are written as Python writes bytes; id 0 is its separator."""
    if data.count == 0 or data.kinds[0] != CONTROL:
        raise data.error("token_type", "of token 0 not a control token", "one: it parts texts")

    def raw(match: re.Match[str]) -> str:
        return (
            chr(int(match[1][1:], 16))
            if match[1][0] == "x" and match[1][1:]
            else _ESCAPED.get(match[1], match[1])
        )

    ids = dict[bytes, int]()
    for id, (token, token_kind) in enumerate(zip(data.tokens, data.kinds, strict=True)):
        if id == 0 or token_kind == UNUSED:
            continue
        try:
            spelled = _ESCAPE.sub(raw, token).encode("latin-1")
        except UnicodeEncodeError:
            raise data.error("tokens", repr(token[:40]), "bytes as Python spells them") from None
        if token_kind != NORMAL or not spelled or ids.setdefault(spelled, id) != id:
            raise data.error(
                "tokens", f"{token[:40]!r}, token {id}", "an ordinary one, of which there is no other"
            )
    text = world.to_json(world.complete(ids, f"{data.container.path}: tokenizer.ggml.tokens"))
    template = data.values.get("tokenizer.chat_template")
    template = _WORLD_CHAT if template == "rwkv-world" else template
    return {
        "tokenizer.json": json.loads(text),
        "tokenizer_config.json": {
            **CLASS,
            "add_bos_token": False,
            **({"chat_template": template} if template else {}),
        },
        "generation_config.json": dict(zip(ROLES, (roles["bos"], ends, roles["padding"]), strict=True)),
    }


def _begins(bos: int | None, data: _Metadata) -> dict[str, Any]:
    """The post-processor that puts BOS before each text."""
    assert bos is not None
    token = data.tokens[bos]
    special, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing", "single": [special, text], "pair": [special, text, second],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }  # fmt: skip


def _model(data: _Metadata, merges: list[list[str]], **options: Any) -> dict[str, Any]:
    none = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    return {"type": "BPE", **none, "fuse_unk": False, "vocab": data.ids, "merges": merges, **options}


def _bpe(data: _Metadata, pre: str) -> dict[str, Any]:
    """Byte-level BPE."""
    merges = []
    for merge in data.list("merges", str):
        at = merge.find(" ", 1)
        pair = [merge[:at], merge[at + 1 :]]
        if at < 0 or not {*pair, "".join(pair)} <= data.ids.keys():
            raise data.error("merges", repr(merge), "two tokens that make one")
        merges.append(pair)
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[pre]},
        "decoder": {**_BYTES, "use_regex": True},
        "model": _model(data, merges, byte_fallback=False, ignore_merges=pre in _WHOLE),
    }


def _spm(data: _Metadata, unknown: int | None) -> dict[str, Any]:
    """SentencePiece's BPE: of the neighbours that make a token, those whose token has the highest score are merged
    first; unknown characters are spelled in bytes. If a text gets a space before it, each part of it between special
    tokens does, too."""
    scores = data.list("scores", float)
    known = {token for token, kind in zip(data.tokens, data.kinds, strict=True) if kind == NORMAL}
    if (longest := max(map(len, known), default=0)) > LONGEST:
        raise data.error("tokens", f"one of {longest:,} characters", f"≤ {LONGEST:,} long")
    merges = list[tuple[float, int, list[str]]]()
    for token in known:
        id = data.ids[token]
        for at in range(1, len(token)):
            if token[:at] in known and token[at:] in known:
                merges.append((-scores[id] if scores else 0.0, id, [token[:at], token[at:]]))
    pairs = [pair for *_, pair in sorted(merges, key=lambda each: (*each[:2], len(each[2][0])))]
    begins = [{"type": "Prepend", "prepend": "▁"}] if data.get("add_space_prefix", True) else []
    less = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *less]
    options = {} if unknown is None else {"unk_token": data.tokens[unknown], "fuse_unk": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*begins, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(data, pairs, byte_fallback=True, ignore_merges=False, **options),
    }
