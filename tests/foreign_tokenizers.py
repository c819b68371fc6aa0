"""Tokenizers of the kinds that models of transformers come with, made by the tokenizers library."""

import json
from collections.abc import Callable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = "The quick brown fox's 1,234 jumps, isn't it?\n\n    indented   = 5; " + "naïve 汉字 😀" * 3
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPECIAL = ["<unk>", "<s>", "</s>"]
ORDINARY = ["<think>", "</think>"]


def byte_level(
    split: str | None = None,
    *,
    whole: bool = True,
    normalizer: normalizers.Normalizer | None = None,
    ignore_merges: bool = False,
    digits: bool = False,
) -> tokenizers.Tokenizer:
    """BPE on bytes. split: None is GPT-2's. whole: each byte has a token. digits: each stands alone."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    first = [] if split is None else [pre_tokenizers.Split(tokenizers.Regex(split), "isolated")]
    first += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if whole else []
    _learn(made, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, **_SHOWN))
    return made


def byte_fallback() -> tokenizers.Tokenizer:
    """BPE of characters with ▁ for a space, and of bytes where it has none: Llama 2, Mistral, Gemma."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    options = {"special_tokens": [*SPECIAL, *bytes_], "limit_alphabet": 60, "max_token_length": 8}
    made.train_from_iterator([TEXT * 5], trainers.BpeTrainer(vocab_size=400, show_progress=False, **options))
    value = json.loads(made.to_str())
    value["added_tokens"] = [token for token in value["added_tokens"] if token["content"] in SPECIAL]
    made = tokenizers.Tokenizer.from_str(json.dumps(value))
    made.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ORDINARY])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return made


def unigram(prepend: str = "always") -> tokenizers.Tokenizer:
    """Unigram with ▁ before words, and an end of text behind: T5."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=prepend == "always")
    made.decoder = decoders.Metaspace(prepend_scheme=prepend, split=prepend == "always")
    _learn(made, trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", **_SHOWN))
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return made


def word_piece() -> tokenizers.Tokenizer:
    """Words and their parts: whose text depends on where they stand."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    _learn(made, trainers.WordPieceTrainer(vocab_size=200, **_SHOWN))
    return made


def words() -> tokenizers.Tokenizer:
    """Whole words, split at spaces and punctuation, without a decoder."""
    made = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    _learn(made, trainers.WordLevelTrainer(vocab_size=200, **_SHOWN))
    return made


_SHOWN = {"special_tokens": SPECIAL, "show_progress": False}


def _learn(made: tokenizers.Tokenizer, trainer: trainers.Trainer) -> None:
    made.train_from_iterator([TEXT * 5], trainer)
    made.add_tokens(ORDINARY)


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt2": byte_level,
    "smollm": lambda: byte_level(whole=False, digits=True),
    "llama3": lambda: byte_level(LLAMA3, ignore_merges=True),
    "qwen2": lambda: byte_level(QWEN2, normalizer=normalizers.NFC()),
    "llama2": byte_fallback,
    "t5": unigram,
    "metaspace at the start": lambda: unigram("first"),
    "bert": word_piece,
    "words": words,
}
