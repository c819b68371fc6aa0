"""The checks that `Rows` makes beside the model: the verdict of the perspectives and the safe set, row by row.

Shapes: B rows, n of them asked about, P perspectives, D model width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from perspectron.decode import reading
from perspectron.decode.projection import Report
from perspectron.decode.reading import END_OF_TEXT_ID
from perspectron.decode.sampling import sample
from perspectron.designs.perspective.safety import Safety
from perspectron.designs.perspective.views import Perspectives, PerspectivesConfig, Verdict
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.util.errors import NonFiniteError

if TYPE_CHECKING:
    from perspectron.decode.batch import Batch, Row


@dataclass(eq=False)
class Watched:
    """Data kept for a row between its tokens.

    before: its state before the last token, if it stands in no batch. chunk: the tokens of the prompt that were read
    last, the state before them, and whether they begin a text; until the first draw. views: states [P − 1] of
    persistent perspectives. seen: what the head reads of them [P − 1, D] after the last token. window: states of the
    head that are not tested yet.
    """

    before: LMState | None = None
    chunk: tuple[list[int], LMState, bool] | None = None
    views: LMState | None = None
    seen: Tensor | None = None
    window: tuple[Tensor, ...] = ()


class Read(NamedTuple):
    """The head's input after the last token of so many rows, and perhaps of rows of no text after them [B,D]; and its
    output, where that is at hand."""

    hidden_BD: Tensor
    rows: int
    logits_BV: Tensor | None = None


class Mark(NamedTuple):
    """The checks of a token that is about to be drawn: verdict, outside the safe set, whether the text ends, and why no
    verdict can be had."""

    verdict: Verdict | None = None
    unsafe: bool = False
    stops: bool = False
    failed: str = ""


class Watch:
    """Perspectives and safe set of a model; errors as those have them."""

    def __init__(
        self, model: LanguageModel, perspectives: PerspectivesConfig | None, safety: Safety | None
    ) -> None:
        self.model, self.safety = model, safety
        self.perspectives = None if perspectives is None else Perspectives(model, perspectives)
        self.persistent = perspectives is not None and perspectives.persistent
        self.keeps = perspectives is not None and not (perspectives.persistent or perspectives.surrogate)
        """True if states before the last token are needed."""
        self._hidden_BD, self._report = torch.empty(0, 0), Report(*[torch.empty(0)] * 3)

    def follow(self, row: Watched, part: list[int], state: LMState, begins: bool, *, last: bool) -> None:
        """Note that a row reads a part of its prompt after `state`. last: it ends the prompt."""
        if self.keeps and last:
            row.chunk = part, state.fork(), begins
        if self.persistent and self.perspectives is not None:
            views = self.perspectives.begin(state) if row.views is None else row.views
            hidden_1PD, row.views = self.perspectives.read([part], views, fresh=[begins])
            row.seen = hidden_1PD[0]

    def heads(self, read: Sequence[Read]) -> list[Tensor]:
        """Logits [n,V] of the rows of each part."""
        logits, parts, reports = list[Tensor](), list[Tensor](), list[Report]()
        for hidden_BD, rows, _ in read:
            parts.append(hidden_BD[:rows])
            if self.safety is not None:
                hidden_BD, report = self.safety.read(hidden_BD)
                reports.append(Report(*(column[:rows] for column in report)))
            logits.append(self._head(hidden_BD)[:rows])
        self._hidden_BD = torch.cat(parts) if parts else self._hidden_BD
        if reports:
            self._report = Report(*(torch.cat(column) for column in zip(*reports, strict=True)))
        return logits

    def _head(self, hidden: Tensor) -> Tensor:
        logits = self.model.head(hidden)
        return logits if self.safety is None else self.safety.masked(logits)

    def _safe(self, hidden: Tensor) -> Tensor:
        """Logits after the safe set's action on what the head reads."""
        return self._head(hidden if self.safety is None else self.safety.read(hidden)[0])

    def marks(self, batch: "Batch", rows: list[int], ids: list[int], logits_BV: Tensor) -> list[Mark]:
        """The marks of the tokens `ids` that were drawn for these rows of the batch."""
        judged: list[Verdict | str | None] = [None] * len(rows)
        if self.perspectives is not None:
            judged = self._judged(self.perspectives, batch, rows, ids, logits_BV)
        unsafe = [self._unsafe(batch.rows[at].watched, at) for at in rows]
        for row in batch.rows:
            row.watched.chunk = row.watched.seen = None
        marks = []
        for at, said, outside in zip(rows, judged, unsafe, strict=True):
            if isinstance(said, str):
                marks.append(Mark(failed=said))
                continue
            verdict = said
            both = verdict is not None and verdict.flagged and self._far(at)
            stops = both or (outside and self.safety is not None and self.safety.action == "stop")
            marks.append(Mark(verdict, outside, stops))
        return marks

    # ------------------------------------------------------------ perspectives

    def _judged(
        self, perspectives: Perspectives, batch: "Batch", rows: list[int], ids: list[int], logits_BV: Tensor
    ) -> list[Verdict | str | None]:
        """The verdicts; for a row of which a perspective's logits are not finite, what is wrong with them."""
        try:
            return list(self._verdicts(perspectives, batch, rows, ids, logits_BV))
        except NonFiniteError as error:
            if len(rows) == 1:
                return [str(error)]
        each = (
            self._judged(perspectives, batch, [at], [id], logits_BV) for at, id in zip(rows, ids, strict=True)
        )
        return [said for one in each for said in one]

    def _verdicts(
        self, perspectives: Perspectives, batch: "Batch", rows: list[int], ids: list[int], logits_BV: Tensor
    ) -> list[Verdict]:
        V = logits_BV.shape[1]
        if self.persistent:
            for row in batch.rows:
                self._go_on(perspectives, row)
        position_n = self._positions(batch, rows)

        def look(of: list[int]) -> Tensor:
            return torch.cat([each(rows[index], position_n[index]) for index in of])

        def each(at: int, position: int) -> Tensor:  # one by one: no other row changes a bit
            if perspectives.config.surrogate:
                return perspectives.stand_ins(self._hidden_BD[[at]], logits_BV[[at]], [position], self._safe)
            return self._safe(self._seen(perspectives, batch, at)).cpu()[None, :, :V]

        def mixed(index: int, log_V: Tensor, chosen: int) -> int:
            row = batch.rows[rows[index]]
            if row.sampling.temperature == 0:
                return chosen
            return int(sample(log_V[None], [row.recent], [row.drawn], row.sampling, [row.stream])[0])

        return perspectives.judge(logits_BV[rows], self._hidden_BD[rows], ids, position_n, look, mixed)

    def _go_on(self, perspectives: Perspectives, row: "Row") -> None:
        """Let persistent perspectives read the last token of a row, unless they did with its prompt."""
        own = row.watched
        if own.seen is None:
            assert own.views is not None
            hidden_1PD, own.views = perspectives.read([row.unread], own.views, fresh=[False])
            own.seen = hidden_1PD[0]

    def _seen(self, perspectives: Perspectives, batch: "Batch", at: int) -> Tensor:
        """The head's inputs from the other perspectives after the last token of a row [P − 1, D]."""
        row = batch.rows[at]
        if row.watched.seen is not None:
            return row.watched.seen
        state = self._before(batch, at)
        length_1 = state.document_length_B
        fresh = length_1 is not None and not length_1.any()
        return perspectives.read([[row.unread[-1]]], perspectives.begin(state), fresh=[fresh])[0][0]

    def _before(self, batch: "Batch", at: int) -> LMState:
        """The state of a row before its last token."""
        row = batch.rows[at]
        if row.watched.chunk is None:
            if row.watched.before is not None:
                return row.watched.before
            assert batch.before is not None
            return batch.before.take(at)
        part, state, begins = row.watched.chunk
        if part[-1] == END_OF_TEXT_ID or len(part) == 1:
            return state
        return reading.read(self.model, [part[:-1]], state.fork(), fresh=[begins])[1]

    def _positions(self, batch: "Batch", rows: list[int]) -> list[int]:
        """The positions of each row's last token in its document; 0 where the state does not count."""
        found = []
        for at in rows:
            state, row = batch.state, at
            if state is None:
                state, row = batch.rows[at].state, 0
            length_B = None if state is None else state.document_length_B
            found.append(0 if length_B is None else int(length_B[row]) - 1)
        return found

    # ------------------------------------------------------------ the safe set

    def _unsafe(self, row: Watched, at: int) -> bool:
        """True if the state of a row, or the mean of a window that ends here, is outside."""
        if self.safety is None:
            return False
        outside, size = bool(self._report.violated_N[at]), self.safety.window
        if size > 0:
            row.window = (*row.window, self._hidden_BD[at].cpu().double())
            if len(row.window) == size:
                mean_1D, row.window = torch.stack(row.window).mean(0, keepdim=True), ()
                outside |= bool(self.safety.polytope.scores(mean_1D)[0] > 0)
        return outside

    def _far(self, at: int) -> bool:
        if self.safety is None or self.safety.on_both != "stop":
            return False
        return bool(self._report.moved_N[at] > self.safety.kappa * self._hidden_BD[at].double().norm())
