"""What was said in a text that a chat template made, as files of `chat` and of the server keep it."""

from typing import Any

import msgspec
from msgspec import Struct, field

SAID = "said"
"""Its name in what a file has beside a text."""


class Said(Struct, forbid_unknown_fields=True, frozen=True):
    """messages: each with `role` and `content`, and what else the template reads of it. start: tokens of the text
    before the first of them. gone: tokens that were drawn and stand there no more; what is drawn next has other noise
    than they had. given: what the template is given beside the messages, such as `tools`."""

    messages: tuple[dict[str, Any], ...] = ()
    start: int = 0
    gone: int = 0
    given: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        texts = all(type(one.get(name)) is str for one in self.messages for name in ("role", "content"))
        if not texts or self.start < 0 or self.gone < 0:
            raise ValueError("no messages")

    def extra(self) -> dict[str, Any]:
        """As a file has it; nothing where nothing was said."""
        made: dict[str, Any] = {SAID: msgspec.to_builtins(self)} if self.messages or self.gone else {}
        return made


def said_in(extra: Any) -> Said:
    """What was said, by what a file has beside its text; nothing where that is no talk."""
    try:
        return msgspec.convert(extra.get(SAID, {}) if isinstance(extra, dict) else {}, Said)
    except msgspec.ValidationError:
        return Said()
