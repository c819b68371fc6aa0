"""The terminal of README.md: python docs/terminal.py

It pastes README.md's first block into a shell, in a copy of the last commit, and draws what that prints as
docs/images/terminal.svg. pip needs the package index, and all of it some minutes. A test compares the picture's
commands with README.md's and runs them with a small model.
"""

import html
import os
import re
import subprocess
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COLUMNS, WIDTH, HEIGHT, MARGIN = 104, 7.25, 18, 20  # of a character and of the window, in pixels
MARK = "\x1e"  # printed before each command's output
# What the light and the dark scheme of the site call paper, rule, ink, soft and accent.
STYLE = """
  text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
  rect { fill: #fbfaf7; stroke: #d9d5ca } .command { fill: #1b2430; font-weight: 600 }
  .output { fill: #55606e } .prompt { fill: #0f6b6b; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    rect { fill: #14181d; stroke: #2c333b } .command { fill: #e6e9ec } .output { fill: #a3adb8 }
    .prompt { fill: #5cc6c0 }
  }
"""


def commands() -> list[str]:
    """The lines of README.md's first block."""
    (block,) = re.findall(
        r"^```sh memory\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )
    return block.splitlines()


def pasted(lines: list[str], folder: Path, env: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """Each command with what a shell in this folder printed before the next."""
    # The shell's own notice of a killed job belongs to no command: it has the time to write that where nobody reads.
    script = "exec 2> /dev/null\n" + "".join(
        f"printf '{MARK}'\n{{ {line}\n}} 2>&1\nsleep 0.3\n" for line in lines
    )
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    before, *printed = done.stdout.split(MARK)
    assert not before, before
    return list(zip(lines, printed, strict=True))


def drawn(session: list[tuple[str, str]]) -> str:
    """The session as an SVG. A command is a group of lines as wide as the terminal, what it printed another."""
    parts, row = [], 0
    for command, printed in session:
        lines = [command[at : at + COLUMNS - 2] for at in range(0, len(command), COLUMNS - 2)]
        parts.append(f'<text class="prompt" x="{MARGIN}" y="{_y(row)}">$</text>')
        parts.append(_group("command", lines, row, MARGIN + 2 * WIDTH))
        row += len(lines)
        said = [
            part for line in printed.strip().splitlines() for part in textwrap.wrap(line, COLUMNS) or [""]
        ]
        if said:
            parts.append(_group("output", said, row, MARGIN))
            row += len(said)
    width, height = round(COLUMNS * WIDTH + 2 * MARGIN), row * HEIGHT + 2 * MARGIN
    frame = f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f"<title>A terminal: the commands above, and what they print</title>\n<style>{STYLE}</style>\n{frame}\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _group(kind: str, lines: list[str], row: int, x: float) -> str:
    texts = (f'<text x="{x:g}" y="{_y(row + i)}">{html.escape(line)}</text>' for i, line in enumerate(lines))
    return f'<g class="{kind}">' + "".join(texts) + "</g>"


def _y(row: int) -> int:
    return MARGIN + 14 + row * HEIGHT


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        env = os.environ | {"PIP_QUIET": "2"}  # what pip says of this machine's indexes does not belong there
        PICTURE.write_text(drawn(pasted(commands(), Path(folder), env)), encoding="utf-8")


if __name__ == "__main__":
    main()
