"""Our tokenizer as a fast tokenizer of transformers."""

import tokenizers
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from perspectron.data.tokenizer import END_OF_TEXT, Tokenizer


def fast_tokenizer(tokenizer: Tokenizer, *, max_length: int | None = None) -> PreTrainedTokenizerFast:
    """The same ids, with the separator before every text, as in training. It pads on the left; the separator's
    spelling inside a text stays text. max_length: of a model with learned positions."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    inner.add_special_tokens(
        [inner.id_to_token(id) for id in sorted(tokenizer.stops - {Tokenizer.end_of_text})]
    )
    inner.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B",
        special_tokens=[(END_OF_TEXT, Tokenizer.end_of_text)],
    )
    limit = {} if max_length is None else {"model_max_length": max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **limit,
    )
