"""What somebody types on a terminal: messages, and keys while there is an answer."""

import contextlib
import os
import select
import sys
from collections import deque
from collections.abc import Iterator

FENCE = '"""'
AFTER = 0.02  # seconds in which the rest of what is pasted comes


def messages(terminal: bool) -> Iterator[str]:
    """The messages on standard input, lines or what stands between two fences, until its end. Of lines that are pasted
    into a terminal at once, each is a message."""
    pasted, rest = deque[str](), ""
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # input() then keeps lines and edits them

            readline.set_startup_hook(lambda: readline.insert_text(rest))

    def line(prompt: str) -> str | None:
        nonlocal rest
        if pasted:
            print(prompt + pasted[0])
            return pasted.popleft()
        try:
            if terminal:
                text = input(prompt)
                *lines, rest = _waiting()
                pasted.extend(lines)
                return text
        except EOFError:
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return ""
        return read.rstrip("\r\n") if (read := sys.stdin.readline()) else None

    while (text := line("> ")) is not None:
        if text.strip() == FENCE:
            lines = list[str]()
            while (text := line(". ")) is not None and text.strip() != FENCE:
                lines.append(text)
            yield "\n".join(lines)
        else:
            yield text


def _waiting() -> list[str]:
    """The lines that were pasted behind one that was read, and the beginning of one more."""
    data = b""
    with _terminal() as number:
        while number is not None and select.select([number], [], [], AFTER)[0]:
            if not (more := os.read(number, 1 << 16)):
                break
            data += more
    *lines, rest = f"{data.decode(errors='replace')}\0".splitlines()
    return [*lines, rest[:-1]]


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Keys typed meanwhile on a terminal are neither shown, which would be in the answer, nor in the next message."""
    with _terminal() as number:
        yield
        if number is not None:
            import termios

            termios.tcflush(number, termios.TCIFLUSH)


@contextlib.contextmanager
def _terminal() -> Iterator[int | None]:
    """The terminal of standard input, without echo, every key at once; None: there is none."""
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
