"""Input that is typed on a terminal: messages, and keys pressed while an answer is printed."""

import contextlib
import os
import re
import select
import sys
from collections import deque
from collections.abc import Iterator

from perspectron.util.errors import DataError

FENCE = '"""'
AFTER = 0.02  # seconds to wait for the rest of what is pasted
END = "\x04"


class Messages:
    """The messages on standard input, until its end: lines, or what stands between two fences. If several lines are
    pasted into a terminal at once, each that is not blank is a message, until one fails or is interrupted (`drop`). An
    interrupt while a message is typed drops it, and so does what is not UTF-8; over a pipe that is a DataError."""

    def __init__(self, terminal: bool) -> None:
        self.terminal, self.pasted, self.rest, self.ended = terminal, deque[str](), "", False
        self.read = 0
        """Bytes read of a pipe."""
        self.edits = None
        if terminal:
            with contextlib.suppress(ImportError):
                import readline

                self.edits = readline  # input() then keeps lines and edits them

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                text = self._message()
            except (KeyboardInterrupt, UnicodeError) as error:
                if not self.terminal:
                    raise
                typed = isinstance(error, UnicodeError)
                print("perspectron: error: what was typed is not UTF-8" if typed else "", file=sys.stderr)
                self.drop()
                continue
            if text is None:
                return
            yield text

    def drop(self) -> int:
        """Discard pasted lines that have not become messages yet: how many."""
        count, self.rest = len(self.pasted), ""
        self.pasted.clear()
        return count

    def _message(self) -> str | None:
        pasted, text = bool(self.pasted), self._line("> ")
        while pasted and text == "":
            pasted, text = bool(self.pasted), self._line("> ")
        if text is None or text.strip() != FENCE:
            return text
        lines = list[str]()
        while (text := self._line(". ")) is not None and text.strip() != FENCE:
            lines.append(text)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        if self.pasted:
            print(prompt + self.pasted[0])
            return self.pasted.popleft()
        if self.ended:
            return None
        if not self.terminal:
            return self._piped()
        try:
            text = self._typed(prompt)
            text.encode()  # Python may let pass what is not UTF-8 as halves of surrogate pairs
        except EOFError:
            return None
        more, end, _ = _waiting().partition(END)
        *lines, self.rest = re.split("\r\n|\r|\n", more)
        self.pasted.extend(lines)
        self.ended = bool(end)
        return text

    def _piped(self) -> str | None:
        """The next line of a pipe."""
        line, begin = sys.stdin.buffer.readline(), self.read
        self.read += len(line)
        try:
            return line.decode().rstrip("\r\n") if line else None
        except UnicodeDecodeError as error:
            raise DataError(f"standard input: byte {begin + error.start} is not UTF-8") from None

    def _typed(self, prompt: str) -> str:
        """A line that is typed after the beginning that was pasted, if any."""
        rest = self.rest
        if self.edits is None:
            return rest + input(prompt + rest)
        self.edits.set_startup_hook(lambda: self.edits.insert_text(rest))
        try:
            return input(prompt)
        finally:
            self.edits.set_startup_hook()


def _waiting() -> str:
    """What was pasted after the line just read."""
    data = b""
    with _terminal() as number:
        while number is not None and select.select([number], [], [], AFTER)[0]:
            if not (more := os.read(number, 1 << 16)):
                break
            data += more
    return data.decode(errors="replace")


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Context in which keys typed on a terminal are neither shown in the answer nor taken for the next message."""
    with _terminal() as number:
        try:
            yield
        finally:
            if number is not None:
                import termios

                termios.tcflush(number, termios.TCIFLUSH)


@contextlib.contextmanager
def _terminal() -> Iterator[int | None]:
    """Context with the file number of a terminal at standard input, unbuffered and without echo; None without one."""
    try:
        import termios

        number = sys.stdin.fileno()
        terminal = os.isatty(number)
    except (ImportError, AttributeError, OSError):  # of another system, or no file
        terminal = False
    if not terminal:
        yield None
        return
    before = termios.tcgetattr(number)
    quiet = [*before]
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(number, termios.TCSADRAIN, quiet)
    try:
        yield number
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
