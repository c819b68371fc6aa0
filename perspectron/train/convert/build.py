"""The student: its config, and the weights that it takes over.

Shapes: B batch, T time, D model width.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from perspectron import presets
from perspectron.data.loader import Batch
from perspectron.model.block import Block
from perspectron.model.config import BlockConfig, ModelConfig, Shift
from perspectron.model.masks import Inputs
from perspectron.model.mixer import Mixer
from perspectron.model.model import LanguageModel, build
from perspectron.model.transfer import Heads
from perspectron.train.convert.config import on_meta
from perspectron.util.config import MixerConfig, require
from perspectron.util.errors import ConfigError
from perspectron.util.hooks import hooked
from perspectron.util.registry import part


def blocks_of(model: LanguageModel) -> list[Block]:
    return cast("list[Block]", list(model.blocks))


def attention_in(model: LanguageModel) -> list[int]:
    """The blocks whose mixer is attention. ConfigError where there is none."""
    found = [
        index
        for index, block in enumerate(blocks_of(model))
        if block.config.mixer is not None and type(block.mixer).heads is not Mixer.heads
    ]
    both = any(type(mixer).heads is not Mixer.heads for block in blocks_of(model) for mixer in block.mixers)
    why = ", alone in its layer: beside another mixer it cannot be converted" if both else ""
    require(bool(found), "run", model.config.name, f"a model with attention to convert{why}")
    return found


def recurrence(to: str) -> type[Mixer]:
    """The class of a design's first mixer."""
    mixer = presets.get(to).blocks[0].mixer
    assert mixer is not None
    return cast("type[Mixer]", part("mixers", mixer.kind))


def in_place(config: ModelConfig, to: str) -> dict[int, MixerConfig]:
    """Config of the recurrence in place of attention, by block. ConfigError: the design cannot have these widths; the
    message names designs that can."""
    found, D = dict[int, MixerConfig](), config.d_model
    shapes = on_meta(config)
    for index in attention_in(shapes):
        heads = blocks_of(shapes)[index].mixer.heads(torch.empty(1, 2, D, device="meta"))
        assert heads is not None
        made = recurrence(to).in_place_of(D, *heads.shape)
        if made is None:
            could = [name for name in targets() if recurrence(name).in_place_of(D, *heads.shape) is not None]
            H, K, _ = heads.shape
            have = f"a design that can have {H} heads of {K} at a width of {D}: {', '.join(could)}"
            require(False, "to", to, have)
        assert made is not None
        found[index] = made
    return found


def targets() -> list[str]:
    """The designs that can be converted to: of several with one recurrence, the last, which is the newest."""
    found = dict[Any, str]()
    for name in presets.DESIGNS:
        mixer = None if "[" in name else presets.get(name).blocks[0].mixer
        kind = None if mixer is None else part("mixers", mixer.kind)
        if kind is not None and kind.take is not Mixer.take:
            found[kind] = name
    return list(found.values())


def student(config: ModelConfig, to: str, converted: Collection[int], window: int) -> ModelConfig:
    """The config of the model with recurrences in these blocks, and the others' attention in a window of at most so
    many tokens; 0 leaves it as it is."""
    made, blocks = in_place(config, to), list(config.blocks)
    for index in made:
        mixer: Any = blocks[index].mixer
        if index in converted:
            mixer = made[index]
        elif window and hasattr(mixer, "window"):
            mixer = replace(mixer, window=min(window, mixer.window or window))
        blocks[index] = replace(blocks[index], mixer=mixer)
    kept = [blocks[index].mixer for index in made if index not in converted]
    whole = any(not getattr(mixer, "window", None) for mixer in kept)
    changed = replace(
        config,
        name=to,
        blocks=tuple(blocks),
        shift=shift(config, to) if converted else config.shift,
        longest=config.longest if whole else 0,
    )
    if config.first_values:
        _require_same_values(config, changed, converted)
    return changed


def _require_same_values(config: ModelConfig, changed: ModelConfig, converted: Collection[int]) -> None:
    """ConfigError if the value residual of some layer would no longer refer to the same layer; the message names
    designs with values of the same width."""

    def widths(blocks: Sequence[BlockConfig]) -> list[int]:
        model = on_meta(replace(config, blocks=tuple(blocks)))
        return [block.mixer.value_channels if block.config.mixer else 0 for block in blocks_of(model)]

    def keeps(to: str) -> bool:
        with suppress(ConfigError):
            made = in_place(config, to)
            blocks = [replace(b, mixer=made[i]) if i in converted else b for i, b in enumerate(config.blocks)]
            return widths(blocks) == widths(config.blocks)
        return False

    if widths(changed.blocks) != widths(config.blocks):
        could = ", ".join(name for name in targets() if keeps(name)) or "none"
        bound = f"false in a model that becomes {changed.name}: its values have other channels (possible: {could})"
        require(False, "first_values", True, bound)


def shift(config: ModelConfig, to: str) -> Shift:
    """The inputs that read the token before: those of the mixers, if the design has a token shift and the model has no
    shift, convolution or second mixer of its own; else as they are."""
    free = not config.shift and config.input_conv is False and not any(b.beside for b in config.blocks)
    return ("q", "k", "v", "g") if presets.get(to).shift and free else config.shift


@contextmanager
def noting(model: LanguageModel, layers: Sequence[int]) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Note during a pass, for each of these blocks, its input and the output of its mixers [B,T,D]."""
    notes, reads = dict[int, tuple[Tensor, Tensor]](), dict[int, Tensor]()

    def watch(index: int, block: Block) -> Iterator[RemovableHandle]:
        def given(_: Any, __: Any, output: Any) -> None:
            y_BTD = output[0] if index not in notes else notes[index][1] + output[0]
            notes[index] = (reads[index], y_BTD)

        yield block.register_forward_pre_hook(lambda _, x: reads.update({index: x[0]}))
        for mixer in block.mixers:
            yield mixer.register_forward_hook(given)

    with hooked(hook for index in layers for hook in watch(index, blocks_of(model)[index])):
        yield notes


@torch.no_grad()
def heads_of(model: LanguageModel, batches: Sequence[Batch]) -> dict[int, Heads]:
    """The `Heads` of each block's attention, with its distances summed over these batches."""
    mixers = {index: blocks_of(model)[index].mixer for index in attention_in(model)}
    reads, found = dict[int, Inputs](), dict[int, Heads]()  # reads: what comes out of norms and token shifts
    hooks = [
        mixer.register_forward_pre_hook(lambda _, given, index=index: reads.update({index: given[0]}))
        for index, mixer in mixers.items()
    ]
    with hooked(hooks):
        for batch in batches:
            model.hidden(batch.ids_BT.to(model.device), reset_BT=None)
            for index, mixer in mixers.items():
                heads = mixer.heads(reads[index])
                assert heads is not None
                heads = Heads(*(getattr(heads, item.name).cpu() for item in fields(heads)))
                before = found.get(index)
                found[index] = (
                    heads if before is None else replace(heads, mass_HT=before.mass_HT + heads.mass_HT)
                )
    return found


@torch.no_grad()
def transferred(
    model: LanguageModel, config: ModelConfig, start: dict[int, Heads] | LanguageModel, seed: int
) -> LanguageModel:
    """The student with all weights that it shares with the model. start: the attention of each block, from which the
    recurrence in its place starts, or a model whose blocks there have learned."""
    made = build(config, seed)
    kinds = [
        [None if b.mixer is None else b.mixer.kind for b in its.blocks] for its in (model.config, config)
    ]
    changed = [i for i, (before, after) in enumerate(zip(*kinds, strict=True)) if before != after]
    own, its = made.state_dict(), model.state_dict()
    new = tuple(f"blocks.{index}.mixer." for index in changed)
    taken = {
        name: weight
        for name, weight in its.items()
        if name in own and own[name].shape == weight.shape and not name.startswith(new)
    }
    if isinstance(start, LanguageModel):
        new = tuple(f"blocks.{index}." for index in changed)
        taken |= {name: weight for name, weight in start.state_dict().items() if name.startswith(new)}
    made.load_state_dict(own | taken)
    for index, (block, before) in enumerate(zip(blocks_of(made), blocks_of(model), strict=True)):
        if index not in changed or isinstance(start, dict):
            _read_alike(block, before)
        if index in changed and isinstance(start, dict):
            block.mixer.take(start[index])
    return made


def _read_alike(block: Block, before: Block) -> None:
    """Set the token shift of a block's mixer to that of the inputs of the same names in another block; inputs that have
    none there read nothing of the tokens before."""
    if block.mixer_shift is None:
        return
    known = dict[str, Tensor]()
    if before.mixer_shift is not None:
        known = {name: row for names, row in _rows(before) for name in names}
    for names, row in _rows(block):
        same = {id(known[name]): known[name] for name in names if name in known}
        row.copy_(torch.stack([*same.values()]).mean(0) if same else torch.zeros_like(row))


def _rows(block: Block) -> Iterator[tuple[Sequence[str], Tensor]]:
    """For each input with a mix, or a convolution: the names of the mixer's inputs that use it, and its row."""
    shift, names = block.mixer_shift, block.mixer.inputs
    assert shift is not None
    (rows,), last = shift.parameters(), len(shift.mixed) - 1
    its = iter(rows.unbind())
    for slot, mixed in enumerate(shift.mixed):
        if mixed:  # a mixer with fewer slots than inputs uses the last for the rest
            yield [name for i, name in enumerate(names) if min(i, last) == slot], next(its)
