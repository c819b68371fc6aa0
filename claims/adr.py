"""The document on ADR (docs/designs/adr.md)."""

from collections.abc import Sequence
from typing import Any

from claims.claim import Claim, Evidence, of, untestable, worded
from claims.measures import adr as tried
from claims.measures import built, common, documents, trained
from claims.measures.built import blocks, counted, mixer_flops, model
from claims.results import Results, command
from perspectron.designs.adr.mixer import ADRConfig, ADRState
from perspectron.presets import get

DEMO, SMALL = "adr-demo", "adr-tiny"
LAYER = ADRConfig(4, 0.97)
NEAR = 64  # tokens of context that count as few


def _growth(context: int) -> float:
    """FLOPs of a token at twice the context over those at it."""
    return round(mixer_flops(LAYER, 2 * context, 256) / mixer_flops(LAYER, context, 256), 2)


def _memories() -> int:
    """Memories of a conversation in the demo's model."""
    states = [layer.memory_B2HK for layer in model(DEMO).init_state(1).layers if isinstance(layer, ADRState)]
    return sum(memory.shape[1] * memory.shape[2] for memory in states)


def _gammas(name: str, digits: int, **sizes: Any) -> tuple[float, ...]:
    """γ of each layer."""
    mixers = [block.mixer for block in get(name, **sizes).blocks]
    return tuple(round(mixer.gamma, digits) for mixer in mixers if isinstance(mixer, ADRConfig))


def _heads() -> int:
    mixer = blocks(DEMO)[0].mixer
    assert isinstance(mixer, ADRConfig)
    return mixer.heads


def _without_decay(_: Results) -> Evidence:
    """Whether memories would grow without it: the largest |h| after inputs of size 100, γ = 0."""
    without, kept = tried.largest_memory(decay=False), tried.largest_memory()
    shown = f"|h| ≤ {without:g} without decay, ≤ {kept:g} with, at inputs of size 100"
    return Evidence((without,), shown, "a GRU's memory is bounded by itself")


def _early(bins: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [b for b in bins if b["to"] <= NEAR]


def _last(bins: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [max(bins, key=lambda b: b["to"])]


def _roughness() -> Evidence:
    shifts = common.at_start(SMALL)["adr_roughness"]
    return Evidence(
        tuple(shifts), f"{min(shifts):.2f} to {max(shifts):.2f} of the shift without memories", "untrained"
    )


# fmt: off
LAWS = (
    Claim("adr-law1", "§2 Law 1", "attention, unchanged: causal, still the read head",
          worded("earlier tokens do not see later ones", 0, 0), of(common.seen_from_before, SMALL)),
    Claim("adr-law2", "§2 Law 2; §Demo", "each attention head has a stateful memory trace",
          worded("2 memories a head: 4 layers × 4 heads × 2 = 32", 32, 32), of(_memories), built=True),
    Claim("adr-law2-keys", "§2 Law 2, our reading", "keys are updated by GRU recurrence, to use",
          worded("lower loss with memories of keys", *trained.LOWER), trained.without("adr", "values_only"),
          command=command("ablate-adr")),
    Claim("adr-law2-values", "§2 Law 2, our reading", "values are updated by GRU recurrence, to use",
          worded("lower loss with memories of values", *trained.LOWER),
          trained.without("adr", "keys_only", "uncoupled"), command=command("ablate-adr")),
    Claim("adr-law3", "§2 Law 3", "decay prevents runaway growth", worded("|h| > 1 without decay", 1.001),
          _without_decay),
    Claim("adr-law3-range", "§2 Law 3", "γ ∈ (0,1)", worded("0 < γ < 1", 1e-9, 1 - 1e-9), of(_gammas, SMALL, 4),
          built=True),
    Claim("adr-law3-helps", "§2 Law 3, our reading", "decay ensures stability while allowing accumulation",
          worded("lower loss than without decay", *trained.LOWER), trained.without("adr", "no_decay"),
          command=command("ablate-adr")),
    Claim("adr-law4", "§2 Law 4", "the model queries the memory trace of prior tokens",
          worded("every token updates every head's", 1, 1, " of the tokens"), of(tried.remembered)),
    Claim("adr-law5", "§2 Law 5, our reading", "memory injected into the representational flow",
          worded("lower loss than without law 5", *trained.LOWER), trained.without("adr", "no_law5"),
          command=command("ablate-adr")),
)

PROPERTIES = (
    Claim("adr-smooth", "§3.1", "Temporal smoothing: attention becomes less volatile",
          worded("shifts less from token to token", 0, 0.999), of(_roughness)),
    Claim("adr-smooth-trained", "§3.1", "and more stable across tokens, trained",
          worded("less than 1 times the shift without memories, in every layer", 0, 0.999),
          trained.of_gates("adr", "adr_roughness", lambda layers: layers, "{:.2f}"),
          condition=("past the first layer",
          trained.of_gates("adr", "adr_roughness", lambda layers: layers[1:], "{:.2f}")),
          command=command("compare")),
    Claim("adr-memory", "§3.2, our reading", "Implicit long-term memory even without huge context windows",
          worded("recalls more pairs than GPT-2", 1e-9), trained.recall("adr", "gpt2"), command=command("recall")),
    Claim("adr-differentiable", "§3.3", "fully trainable, end-to-end differentiable",
          worded("gradients equal finite differences", 1, 1),
          of(lambda: Evidence((tried.gradients_right(),), "equal, of inputs, state and weights"))),
    Claim("adr-hierarchy", "§3.4", "Emergent: early layers short-term (low decay), deeper ones long-term",
          worded("learned half-lives grow with depth", 1e-9),
          documents.emergent_halflives, command=command("documents")),
)

INTERPRETATION = (
    Claim("adr-rnn-memory", "§4", "RNN-like memory efficiency",
          worded("a state that does not grow", 1, 1, " times at 8k tokens what it is at 1k"),
          of(lambda: round(built.mixer_values(LAYER, 8192, 256) / built.mixer_values(LAYER, 1024, 256), 2))),
    Claim("adr-cache", "§4", "RNN-like memory efficiency, beside GPT-2",
          worded("less than GPT-2's state", 0, 0.999, " times GPT-2's at 1,024 tokens"),
          of(lambda: round(counted("adr-124m").state_bytes[1024] / counted("gpt2-124m").state_bytes[1024], 4))),
    Claim("adr-quadratic", "§4", "Better scaling to long contexts without quadratic blowup",
          worded("a token costs the same at any length", 0.99, 1.01, " times at twice a million tokens"),
          of(_growth, 1 << 20)),
    Claim("adr-transformer", "§4, our reading", "Transformer-like flexibility",
          worded("at most 0.01 higher loss than the transformer's", *trained.NO_HIGHER),
          trained.beside("adr", "transformer", "parts/transformer",
                         "with the transformer's rate chosen at more tokens"),
          command=command("reference/results")),
)

HYPOTHESIS = (
    Claim("adr-window", "§5, our reading", "Reduces the need for massive context windows",
          worded(f"lower loss than GPT-2 within {NEAR} tokens", *trained.LOWER),
          trained.at_positions("adr", "gpt2", _early), command=command("compare")),
    Claim("adr-coherence", "§5, our reading", "Improves coherence in long text",
          worded("lower loss than GPT-2 late in the context", *trained.LOWER),
          trained.at_positions("adr", "gpt2", _last), command=command("compare")),
    Claim("adr-coherence-repeats", "§5, our reading", "Improves coherence in long text: it repeats itself less",
          worded("fewer repeated 4-grams than GPT-2", *trained.LOWER),
          documents.coherent("repeated_4grams", "of 4-grams"), command=command("documents")),
    Claim("adr-coherence-names", "§5, our reading", "Improves coherence in long text: it comes back to its names",
          worded("more names of the first half again in the second", 1e-9),
          documents.coherent("names_again", "of names"), command=command("documents")),
    Claim("adr-coherence-judged", "§5, our reading", "Improves coherence in long text: another model finds it likelier",
          worded("lower loss of an independent model than GPT-2's text", *trained.LOWER),
          documents.coherent("bits_per_byte", "bits per byte"), command=command("documents")),
    Claim("adr-loss", "§5, our reading", "whatever it reduces or improves, it models text better",
          worded("lower loss than GPT-2, equal parameters", *trained.LOWER), trained.versus("adr", "gpt2"),
          command=command("reference/results")),
    Claim("adr-biology", "§5", "More biologically-plausible memory dynamics",
          worded("closer to cortical recurrence", 1),
          untestable("no measure of plausibility in a language model", "no such measure")),
)


DEMONSTRATION = (
    Claim("adr-demo-layers", "§Demo", "a small GPT2, 4 layers", "4 layers", of(lambda: len(blocks(DEMO))), built=True),
    Claim("adr-demo-width", "§Demo", "256 hidden", "256", of(lambda: model(DEMO).config.d_model), built=True),
    Claim("adr-demo-heads", "§Demo", "n_head = 4", "4 heads", of(_heads), built=True),
    Claim("adr-demo-vocabulary", "§Demo", "vocab_size = 50257", "50257", of(lambda: model(DEMO).config.vocab_size),
          built=True),
    Claim("adr-demo-positions", "§Demo", "n_positions = 64", "64 positions", of(lambda: model(DEMO).config.positions),
          built=True),
    Claim("adr-demo-decay", "§Demo", "decay = 0.97", worded("γ = 0.97 in every layer", 0.965, 0.975),
          of(_gammas, DEMO, 3), built=True),
)
# fmt: on

CLAIMS = LAWS + PROPERTIES + INTERPRETATION + HYPOTHESIS + DEMONSTRATION
