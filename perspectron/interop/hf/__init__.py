"""Our models and tokenizers in transformers: once this module is imported, `AutoModelForCausalLM.from_pretrained` reads
what `perspectron export RUN --hf DIR` wrote (pip install 'perspectron[hf]')."""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ImportError(
        "perspectron.interop.hf needs transformers 5; install it with: pip install 'perspectron[hf]'"
    )

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from perspectron.interop.hf.cache import StateCache, StateLayer
from perspectron.interop.hf.configuration import PerspectronConfig
from perspectron.interop.hf.modeling import PerspectronForCausalLM, Schedules
from perspectron.interop.hf.tokenizer import fast_tokenizer

__all__ = [
    "PerspectronConfig",
    "PerspectronForCausalLM",
    "Schedules",
    "StateCache",
    "StateLayer",
    "fast_tokenizer",
]

AutoConfig.register("perspectron", PerspectronConfig, exist_ok=True)
AutoModelForCausalLM.register(PerspectronConfig, PerspectronForCausalLM, exist_ok=True)
AutoTokenizer.register(PerspectronConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
