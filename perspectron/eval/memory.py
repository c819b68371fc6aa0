"""How much memory something takes at its peak."""

from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self


class Peak:
    """`with Peak() as peak: …`; then `peak.bytes` is how far resident memory rose above where it stood at the
    beginning (None where there is no /proc).

    The kernel's high-water mark is set back first. getrusage's ru_maxrss cannot be: it holds the peak of
    importing torch and, in a subprocess, that of the process which started it.
    """

    bytes: int | None = None

    def __enter__(self) -> Self:
        self._before: int | None = None
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status("VmRSS")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            self.bytes = max(0, _status("VmHWM") - self._before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
