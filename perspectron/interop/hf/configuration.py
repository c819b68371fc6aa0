"""The config that transformers reads: our model's config, whole, beside the few fields that its tools look for."""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from perspectron.model.config import ModelConfig
from perspectron.util.config import dump, load


class PerspectronConfig(PreTrainedConfig):
    """Config of PerspectronForCausalLM. architecture: a ModelConfig as plain JSON values; its vocabulary size is
    overridden by `vocab_size`, which transformers changes when tokens are added. end_of_text: id of the token at which
    the model forgets all before it; None where there is none."""

    model_type = "perspectron"
    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    architecture: dict[str, Any] | None = None
    end_of_text: int | None = 0
    use_cache: bool = True

    @classmethod
    def of(cls, config: ModelConfig, **more: Any) -> "PerspectronConfig":
        """The config of a model of ours."""
        limit = {"max_position_embeddings": config.positions} if config.positions else {}
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_hidden_layers=len(config.blocks),
            architecture=dump(config),
            tie_word_embeddings=config.head is None,
            **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **limit, **more},
        )

    def model_config(self) -> ModelConfig:
        """The config of our model. ConfigError, naming the field, unless it is one."""
        config = load(ModelConfig, self.architecture, "architecture")
        return replace(config, vocab_size=self.vocab_size)
