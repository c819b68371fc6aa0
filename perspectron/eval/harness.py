"""The model interface of lm-evaluation-harness; `perspectron lm-eval` registers it there.

Every request is a separate document: the tokenizer's prefix is read first, as in training. Requests longer than a table
of positions are cut to their last tokens, as the harness does for any model of bounded context. Designs without a
table read everything, with the state carried from chunk to chunk.

Shapes: B rows, T time, D model width, V vocabulary, M tokens that are scored.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perspectron.data.tokenizer import Tokenizer
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.eval.reading import CHUNK
from perspectron.model.model import LanguageModel
from perspectron.util.config import one_of, require
from perspectron.util.errors import NonFiniteError

MAX_TOKENS = 256
"""Tokens generated where a request does not say how many, as in the harness."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names by which tasks call the number of tokens to generate; the first that is there counts, as in the harness."""
NO_START = (
    "after a token: this tokenizer has none that begins texts or ends them, so the first cannot be scored"
)
GENERATION = ("until", "do_sample", "temperature", "top_k", "top_p", *LENGTHS)


class Row(NamedTuple):
    """Ids that are read, and how many at the end are scored, each given those before it."""

    ids: list[int]
    scored: int


class Score(NamedTuple):
    """Nats of the scored tokens together; whether each of them was the most likely one."""

    log_likelihood: float
    greedy: bool


@dataclass(frozen=True)
class Answers:
    """batch_size: requests read side by side; it changes no answer beyond rounding. dtype: autocast to it."""

    model: LanguageModel
    tokenizer: Tokenizer
    batch_size: int = 8
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "batch_size", self.batch_size, "≥ 1")

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """Scores of each continuation after its context; an empty one has likelihood 1. ConfigError for one that is
        longer than a table of positions, or begins a text with nothing before it."""
        return self._scores([self._row(context, continuation) for context, continuation in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """The log-likelihood of each text as a whole, in nats. With a table of P positions, P tokens are scored at a
        time, in a window that begins up to P tokens before the last of them."""
        encoded = self.tokenizer.encode_batch(list(texts))
        can = len(self.tokenizer.specials.start) > 0
        for text, ids in zip(texts, encoded, strict=True):
            require(can or not ids, "text", text[:80], NO_START)
        documents = [self._begun(ids) for ids in encoded]
        rows = [list(self._windows(ids)) for ids in documents]
        scores = iter(self._scores([row for windows in rows for row in windows]))
        return [sum(next(scores).log_likelihood for _ in windows) for windows in rows]

    def continuations(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Text after each context. It ends before the first of its `until` strings, at the end of the document or after
        `max_gen_toks` tokens, and is greedy unless `do_sample`; each is drawn apart from the others. ConfigError
        for an option that is not in GENERATION, and for more tokens than a table of positions has."""
        rows = [self._prompt(context, *_wanted(options)) for context, options in requests]
        waiting = sorted(
            range(len(rows)), key=lambda i: len(rows[i]["prompt"])
        )  # the longest last, as it is taken first
        texts, request_of, under_way = [""] * len(rows), dict[int, int](), Rows(self.model, self.tokenizer)
        with torch.autocast(self.model.device.type, self.dtype, enabled=self.dtype is not None):
            while waiting or under_way.active:
                while waiting and len(under_way.active) < self.batch_size:
                    i = waiting.pop()
                    request_of[under_way.add(**rows[i], stream=i)] = i
                for piece in under_way.step():
                    if piece.finished == "error":
                        raise NonFiniteError(f"request {request_of[piece.row]}: the logits are not finite")
                    texts[request_of[piece.row]] += piece.text
                    if piece.finished is not None:
                        under_way.remove(piece.row)
        return texts

    def _row(self, context: str, continuation: str) -> Row:
        """The row of a continuation, to which spaces at the end of the context belong. Both are encoded together, as
        the harness does for any model; apart if a token would lie across the border."""
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        before, both, after = self.tokenizer.encode_batch([stripped, stripped + continuation, continuation])
        scored = both[len(before) :] if both[: len(before)] == before else after
        begun = self._begun(before)
        require(len(begun) > 0 or not scored, "context", context, NO_START)
        return Row([*begun, *scored], len(scored))

    def _begun(self, ids: list[int]) -> list[int]:
        """The ids of a text after a start token, so that the first of them can be scored: if the tokenizer has none,
        after the token that ends texts, as in the harness; after nothing, if it has neither."""
        return [*self.tokenizer.specials.start, *self.tokenizer.specials.bare(ids)]

    def _windows(self, ids: list[int]) -> Iterator[Row]:
        step, start = self.model.config.positions or max(1, len(ids) - 1), len(self.tokenizer.specials.start)
        for read in range(1, len(ids), step):
            end, done = min(read + step, len(ids)), max(read, start)
            if done < end:
                yield Row(ids[max(0, end - step - 1) : end], end - done)

    def _scores(self, rows: Sequence[Row]) -> list[Score]:
        scores = [Score(0.0, True)] * len(rows)
        scored = [i for i, row in enumerate(rows) if row.scored]
        scored.sort(key=lambda i: len(rows[i].ids), reverse=True)  # rows of a batch are about equally long
        for at in range(0, len(scored), self.batch_size):
            part = scored[at : at + self.batch_size]
            for i, score in zip(part, self._batch(self._cut([rows[i] for i in part])), strict=True):
                scores[i] = score
        return scores

    def _cut(self, rows: Sequence[Row]) -> list[Row]:
        """Rows cut to their last tokens: as many as a table of positions has, and the last one, which is not read."""
        table = self.model.config.positions
        if table == 0:
            return list(rows)
        most = max(scored for _, scored in rows)
        require(most <= table, "tokens of a continuation", most, f"≤ positions = {table}")
        return [Row(ids[-(table + 1) :], scored) for ids, scored in rows]

    @torch.inference_mode()
    def _batch(self, rows: Sequence[Row]) -> list[Score]:
        B, T = len(rows), max(len(ids) for ids, _ in rows) - 1
        device = self.model.device
        ids_BT = torch.zeros(B, T + 1, dtype=torch.int64)
        scored_BT = torch.zeros(B, T, dtype=torch.bool)
        for row, (ids, scored) in enumerate(rows):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
            scored_BT[row, len(ids) - 1 - scored : len(ids) - 1] = True
        pad_BT = torch.arange(T) >= torch.tensor([len(ids) - 1 for ids, _ in rows])[:, None]
        total_B, greedy_B = torch.zeros(B, dtype=torch.float64), torch.ones(B, dtype=torch.bool)
        state = self.model.init_state(B, capacity=T)
        with torch.autocast(device.type, self.dtype, enabled=self.dtype is not None):
            for part in torch.arange(T).split(max(1, CHUNK // B)):
                pad = pad_BT[:, part].to(device) if pad_BT[:, part].any() else None
                part_BT = ids_BT[:, part].to(device)
                hidden_BTD, state, _ = self.model.hidden(part_BT, state, pad_BT=pad, consume_state=True)
                mask_BT = scored_BT[:, part]
                if mask_BT.any():
                    row_M, target_M = mask_BT.nonzero()[:, 0], ids_BT[:, part + 1][mask_BT]
                    log_p_M, greedy_M = self._judged(hidden_BTD[mask_BT.to(device)], target_M)
                    total_B.index_add_(0, row_M, log_p_M)
                    greedy_B[row_M[~greedy_M]] = False
        return [Score(*pair) for pair in zip(total_B.tolist(), greedy_B.tolist(), strict=True)]

    def _judged(self, hidden_MD: Tensor, target_M: Tensor) -> tuple[Tensor, Tensor]:
        """log p of each target, and whether it is the most likely token; on the CPU."""
        logits_MV = self.model.head(hidden_MD[None])[0]
        log_p_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)).log_softmax(1).cpu()
        log_p_M = log_p_MV.gather(1, target_M[:, None])[:, 0]
        return log_p_M.double(), log_p_MV.argmax(1) == target_M

    def _prompt(
        self, context: str, until: tuple[str, ...], max_tokens: int | None, sampling: SamplingConfig
    ) -> dict[str, Any]:
        """Arguments of `Rows.add` for a request. ConfigError for more tokens than a table of positions has."""
        table = self.model.config.positions
        if max_tokens is None:
            max_tokens = min(MAX_TOKENS, table // 2) if table else MAX_TOKENS
        require(table == 0 or max_tokens < table, "max_gen_toks", max_tokens, f"< positions = {table}")
        ids = self.tokenizer.encode(context)[-(table - max_tokens) if table else 0 :]
        return {"prompt": ids, "max_tokens": max_tokens, "sampling": sampling, "stop": until}


def _wanted(options: Mapping[str, Any]) -> tuple[tuple[str, ...], int | None, SamplingConfig]:
    """(until, max_gen_toks, sampling) of a request."""
    for name in options:
        one_of(name, GENERATION, "generation option")
    until = options.get("until") or ()
    until = (until,) if isinstance(until, str) else tuple(filter(None, until))
    require(all(isinstance(stop, str) for stop in until), "until", until, "strings")
    sampling = SamplingConfig(temperature=0.0)
    if options.get("do_sample"):
        temperature, top_p = _number(options, "temperature", 1.0), _number(options, "top_p", 1.0)
        sampling = SamplingConfig(temperature, top_k=int(_number(options, "top_k", 0)), top_p=top_p)
    most = next((int(_number(options, name, 0)) for name in LENGTHS if options.get(name) is not None), None)
    return until, most, sampling


def _number(options: Mapping[str, Any], name: str, otherwise: float) -> float:
    """An option as a finite number; null counts as not given."""
    value = options.get(name)
    value = otherwise if value is None else value
    require(isinstance(value, int | float) and math.isfinite(value), name, value, "a finite number or null")
    return float(value)
