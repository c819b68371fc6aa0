"""Messages of a text that a chat template made of them, as files of `chat` and of the server keep them."""

from typing import Any

import msgspec
from msgspec import Struct, field

SAID = "said"
"""Name of the messages among a file's entries."""


class Said(Struct, forbid_unknown_fields=True, frozen=True):
    """The messages of a text. messages: each has `role` and `content`, and what else the template reads. start: tokens
    of the text before the first one. gone: number of drawn tokens that were removed again; it gives what is drawn next
    other noise than they had. given: what the template is given besides the messages, such as `tools`."""

    messages: tuple[dict[str, Any], ...] = ()
    start: int = 0
    gone: int = 0
    given: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        texts = all(type(one.get(name)) is str for one in self.messages for name in ("role", "content"))
        if not texts or self.start < 0 or self.gone < 0:
            raise ValueError("no messages")

    def extra(self) -> dict[str, Any]:
        """The entry for a file; none if nothing was said."""
        made: dict[str, Any] = {SAID: msgspec.to_builtins(self)} if self.messages or self.gone else {}
        return made


def said_in(extra: Any) -> Said:
    """The messages among a file's entries; none if it has no valid ones."""
    try:
        return msgspec.convert(extra.get(SAID, {}) if isinstance(extra, dict) else {}, Said)
    except msgspec.ValidationError:
        return Said()
