"""A tokenizer as a fast tokenizer of transformers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from perspectron.data.specials import OURS
from perspectron.data.tokenizer import Tokenizer


def fast_tokenizer(
    tokenizer: Tokenizer, *, max_length: int | None = None, roles: Mapping[str, str] = MappingProxyType({})
) -> PreTrainedTokenizerFast:
    """A fast tokenizer with the same ids, which puts the prefix before every text, as in training, and pads on the
    left. For ours, the separator's spelling inside a text stays text. max_length: of a model with learned positions.
    roles: tokens by role, such as bos_token, where the tokenizer itself has none."""
    inner, special = tokenizers.Tokenizer.from_str(tokenizer.to_str()), tokenizer.specials
    named = {"bos": special.prefix[:1], "eos": (special.end,), "pad": (special.pad,)}
    if tuple(inner.encode("a").ids[: len(special.prefix)]) != special.prefix:
        first = [tokenizer.spelling(id) for id in special.prefix]
        inner.post_processor = processors.TemplateProcessing(
            single=[*first, "$A"],
            pair=[*first, "$A", *first, "$B"],
            special_tokens=[*zip(first, special.prefix, strict=True)],
        )
    if special == OURS:
        named = dict.fromkeys(named, special.prefix)
    known = PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES
    there = {role: token for role, token in roles.items() if inner.token_to_id(token) is not None}
    more = {role: token for role, token in there.items() if role not in known}
    tokens: dict[str, Any] = {role: token for role, token in there.items() if role in known}
    tokens |= {"extra_special_tokens": more} if more else {}
    tokens |= {
        f"{name}_token": tokenizer.spelling(id) for name, ids in named.items() for id in ids if id is not None
    }
    limit = {} if max_length is None else {"model_max_length": max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        padding_side="left",
        split_special_tokens=special == OURS,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **tokens,
        **limit,
    )
