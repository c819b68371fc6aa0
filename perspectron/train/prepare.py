"""The step from a corpus to a tokenizer and shards, done once, in the run's folder."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from perspectron.data import Corpus, Shards, Tokenizer, encode, is_encoded, made_in, open_corpus, open_shards
from perspectron.data.corpus import RULE
from perspectron.data.encoding import Tell
from perspectron.data.loader import Loader
from perspectron.data.mixture import parts_of
from perspectron.data.origin import FOLDER, carry, template_in, template_of_prompts
from perspectron.data.template import FILE, NO_TOKENS, OWN, PLAIN, Template, tokens_of
from perspectron.train.checkpoint import load_config, run_of
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.util.config import require
from perspectron.util.errors import CheckpointError, ConfigError, DataError
from perspectron.util.files import remove, safe_join


def prepare(
    run: Path, config: RunConfig, *, tell: Tell = lambda _, __: None
) -> tuple[Tokenizer, Shards, str]:
    """(tokenizer, shards, a line that says what was read) for a run that is new or goes on.

    `config.train.data` is a corpus, or a folder that `tokenize` wrote (a manifest.json with its tokenizer.json beside
    it). A run that starts from another, or learns from one, has its tokenizer. tell: as in `encode`. The tokenizer is
    kept as RUN/tokenizer.json, and once the run has a config.json it is only compared; a corpus is encoded into
    RUN/data, and an encoding that was interrupted goes on. DataError as `perspectron.data` raises it, and when shards
    and tokenizer do not belong together; ConfigError when the model has fewer ids than the tokenizer, when a corpus is
    to be measured on dev, a split that only `tokenize` makes, and for a kind of tokenizer where the tokenizer is given.
    """
    source, kept, encoded = config.train.data, run / "tokenizer.json", safe_join(run, "data", DataError)
    resumes = (run / "config.json").is_file()
    origin, whole = config.train.init or config.train.teacher, is_encoded(source)
    if origin or whole:
        bound = f"left out: the tokenizer is that of {origin or source}"
        require(config.train.tokenizer == "bpe", "tokenizer", config.train.tokenizer, bound)
    if whole:
        shards, tokenizer = open_shards(Path(source)), Tokenizer.load(Path(source) / "tokenizer.json")
        _require_template(Path(source), shards, template_of(run, config))
        summary = source
    elif resumes and (encoded / "manifest.json").is_file():
        shards, tokenizer = open_shards(encoded), Tokenizer.load(kept)
        summary = f"{source}, as encoded before"
    else:
        if not source:
            raise DataError(f"{run}: it is not known what text it was trained on; name a text with --data")
        template = template_of(run, config)
        corpus = open_corpus(source, config.train.heldout, template=template, rule=config.rule, out=run)
        bound = f"heldout, or data a folder that tokenize --dev made of {source}"
        require(config.train.measured_on == "heldout", "measured_on", config.train.measured_on, bound)
        if not resumes:
            _require_same_split(config.train)
        if resumes or origin:
            tokenizer = Tokenizer.load(kept if resumes else run_of(Path(origin)) / "tokenizer.json")
        else:
            tokenizer = made_in(encoded, config.train.tokenizer, corpus, config.model.vocab_size)
        shards = encode(corpus, tokenizer, encoded, tell=tell)
        remove(encoded / FILE)
        if template is not None:
            template.save(encoded)
        summary = _summary(corpus, shards)
    _check(run, config, tokenizer, shards)
    if not resumes:
        tokenizer.save(kept)
        if config.train.init:
            carry(run_of(Path(config.train.init)), run)
        if (template := template_of(run, config)) is not None:
            template.save(run)
        for _, before, its in trained_before(config.train):
            if its.train.data != source and (whole or is_encoded(its.train.data)):
                folder = source if whole else its.train.data
                summary += f"\n{folder} is encoded: {before} may have been trained on what is held out here"
                break
    return tokenizer, shards, summary


def trained_before(train: TrainConfig) -> Iterator[tuple[str, str, RunConfig]]:
    """The runs that a training starts or learns from, and those that these did, as far as they are there: (the field
    that leads to it, its folder, its config)."""
    named, seen = [("teacher", train.teacher), ("init", train.init)], {""}
    while named:
        field, run = named.pop()
        if run in seen:
            continue
        seen.add(run)
        with contextlib.suppress(CheckpointError, ConfigError):
            its = load_config(run_of(Path(run)))
            named += [(field, its.train.teacher), (field, its.train.init)]
            yield field, run, its


def held_out_before(train: TrainConfig) -> list[float]:
    """The shares that the runs before a training held out of a text that it reads."""
    return [its.train.heldout for _, _, its in trained_before(train) if _same_text(its.train, train)]


def _same_text(one: TrainConfig, other: TrainConfig) -> bool:
    """True if one source of each is the same."""
    its, others = ({part.source for part in parts_of(x.data)} or {x.data} for x in (one, other))
    return not its.isdisjoint(others)


def _require_same_split(train: TrainConfig) -> None:
    """ConfigError if a run before it was trained on a text of this training and held out other records of it."""
    for name, run, its in trained_before(train):
        same = bool(its.train.template) == bool(train.template) and (its.rule == RULE or not train.template)
        apart = f"a run of another text than {train.data}: it was trained on parts of it that would be held out now"
        require(same or not _same_text(its.train, train), name, run, apart)


def template_of(run: Path, config: RunConfig) -> Template | None:
    """The chat template of a run: kept in its folder, or named by its config where the run is new."""
    if not config.train.template:
        return None
    if (run / "config.json").is_file() and (run / FILE).is_file():
        return template_of_prompts(run)
    return asked_template(config.train)


def asked_template(train: TrainConfig) -> Template | None:
    """The chat template that a new training asks for. ConfigError: there is none of this name."""
    if not train.template:
        return None
    origin = run_of(Path(train.init)) if train.init else None
    if train.template != OWN:
        return Template.named(train.template, NO_TOKENS if origin is None else tokens_of(origin / FOLDER))
    found = None if origin is None else template_in(origin)
    came = "own needs init, a run with one" if origin is None else f"{origin} has none"
    require(found is not None, "template", OWN, f'"{PLAIN}", or a file with one in Jinja; {came}')
    return found


def _require_template(folder: Path, shards: Shards, template: Template | None) -> None:
    """ConfigError unless encoded text has prompts and completions by this template, or neither."""
    its = Template.of(folder)
    said = "left out" if template is None else template.name
    if shards.split("train").learned is None:
        pairs = f"left out: {folder} was encoded without prompts and completions"
        require(template is None, "template", said, pairs)
    else:
        same = its is not None and template is not None and its.text == template.text
        require(same, "template", said, f"{folder / FILE}, with which its prompts were encoded")


def _check(run: Path, config: RunConfig, tokenizer: Tokenizer, shards: Shards) -> None:
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"vocab_size = {config.model.vocab_size}, must be ≥ {tokenizer.vocab_size}, the tokenizer's"
        )
    known = {f"{shards.path}: encoded": shards.tokenizer_fingerprint}
    if (run / "config.json").is_file():
        known[f"{run}: trained"] = Tokenizer.load(run / "tokenizer.json").fingerprint
    for what, fingerprint in known.items():
        if fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"{what} with tokenizer {fingerprint[:12]}, the tokenizer here is {tokenizer.fingerprint[:12]}"
            )


def _summary(corpus: Corpus, shards: Shards) -> str:
    train, rest = shards.split("train"), shards.split("heldout")
    read = f"{corpus.source} (digest {corpus.digest}): {train.documents} documents, "
    read += f"{train.text_bytes / 1e6:.1f} MB to train on, {rest.text_bytes / 1e6:.2f} MB held out "
    read += f"({rest.text_bytes / max(1, train.text_bytes + rest.text_bytes):.1%})"
    return "\n".join([read, *corpus.notes()])


def training_batches(config: RunConfig, shards: Shards, rank: int = 0, world_size: int = 1) -> Loader:
    """A loader of a rank's rows, at the run's first batch. DataError when the text is too short for one window."""
    train, split = config.train, shards.split("train")
    if split.tokens <= train.seq_len:
        each = max(1.0, split.text_bytes / max(1, split.tokens))  # a document's end is a token without text
        more = f"about {math.ceil((train.seq_len + 1) * each):,} bytes of text"
        bytes_do = f", --set vocab_size=257 (a token for each of its {split.text_bytes} bytes)"
        smaller = bytes_do if split.text_bytes > train.seq_len and not train.init else ""
        raise DataError(
            f"{train.data}: {split.tokens} tokens, need at least {train.seq_len + 1} (seq_len + 1): "
            f"{more}{smaller}, or --seq-len {max(1, split.tokens // 2)}"
        )
    return Loader(
        split,
        rank=rank,
        world_size=world_size,
        batch_size=train.batch_size,
        seq_len=train.seq_len,
        seed=train.seed,
    )
