"""Ablations of Lens-gated GPT-2: its steps, from GPT-2 on."""

from dataclasses import replace

from perspectron.compare.ablations import Ablation, Change, with_mixers
from perspectron.designs.lens.mixer import LensConfig
from perspectron.model.config import BlockConfig, ModelConfig, SequentialConfig
from perspectron.model.ffn import ContextMLPConfig, MLPConfig
from perspectron.util.config import require


def _lens(*parts: str, mlp: str = "plain", output_gate: bool = False) -> Change:
    """Change to GPT-2 with these parts and no others. mlp: "plain", "gated" (by its channels) or "detached" (it reads
    the output of attention without sending a gradient back)."""

    def change(config: ModelConfig) -> ModelConfig:
        switches = {name: name in parts for name in ("reciprocity", "discoverability", "gates")}
        config = with_mixers(config, LensConfig, **switches, output_gate=output_gate)
        return replace(config, blocks=tuple(map(network, config.blocks)))

    def network(block: BlockConfig) -> BlockConfig:
        ffn = block.ffn
        block = block if "route" in parts else replace(block, residual=SequentialConfig())
        if not isinstance(ffn, ContextMLPConfig):
            require(mlp == "plain", "context", False, "true: networks with gates on their channels")
            return block
        if mlp == "plain":
            return replace(block, ffn=MLPConfig(ffn.hidden, ffn.activation))
        context = mlp == "detached"
        rank = ffn.context_rank if context else 0
        return replace(block, ffn=replace(ffn, context=context, context_rank=rank, stop_gradient=context))

    return change


LENSES = ("reciprocity", "discoverability", "gates")
LENS = {
    "plain": Ablation(_lens(), "step 1: GPT-2"),
    "reciprocity": Ablation(_lens(*LENSES[:1]), "step 2: plus reciprocity, with a fixed weight of 0.16"),
    "discoverability": Ablation(_lens(*LENSES[:2]), "step 3: plus discoverability, still with fixed weights"),
    "gates": Ablation(_lens(*LENSES), "step 4: plus learned weights of the mixture, per head"),
    "route": Ablation(_lens(*LENSES, "route"), "step 5: plus the route gate"),
    "gated_mlp": Ablation(
        _lens(*LENSES, "route", mlp="gated"), "step 6: plus networks with gates on their channels"
    ),
    "detached": Ablation(
        _lens(*LENSES, "route", mlp="detached"),
        "step 7: plus networks that read the context without a gradient; step 8, with one, is the whole design",
    ),
    "output_gate": Ablation(
        _lens(output_gate=True),
        "control: GPT-2 with only a sigmoid gate on the output of attention",
    ),
}
