"""Quotations of a program's output: complete lines, bounded, and without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from reconciled.core.errors import ProgramFailed
from reconciled.observe.redaction import Redactor
from reconciled.programs.children import current_children
from reconciled.programs.output import Output, printable_tail
from reconciled.programs.run import run_program

SECRET = "tok-Q7x9-secret-of-some-length"


def hiding() -> Redactor:
    redactor = Redactor()
    redactor.register(SECRET)
    return redactor


def test_no_cut_leaves_half_a_secret() -> None:
    """A secret that a line's limit would cut in two is hidden before the line is cut."""
    for before in range(270, 301):
        (line,) = printable_tail(b"-" * before + SECRET.encode(), hiding().redact)
        assert not set(line) & set(SECRET.replace("-", "")) - set("[redacted]")


def test_the_tail_begins_with_a_whole_line(tmp_path: Path) -> None:
    """A quotation begins at a line's start: a secret in part of a line is not recognised."""
    output = Output.open(tmp_path / "out", 1024 * 1024)
    with output.writer() as writer:
        # The bytes that are read begin nine letters before the end of the secret.
        text = f"{SECRET}\n{'-' * 4000}\n{'-' * 4180}\n"
        assert len(text) - len(SECRET) == 8192 - 9
        Path(f"/proc/self/fd/{writer}").write_text(text)
    assert output.tail(hiding().redact) == ("-" * 300, "-" * 300)
    output.close()


@pytest.mark.processes
async def test_a_failure_quotes_no_secret(tmp_path: Path) -> None:
    """A failure quotes output after the registry of programs has redacted it."""
    current_children().redact = hiding().redact
    ended = await run_program(["sh", "-c", f"echo got {SECRET}; exit 1"], output=tmp_path)
    with pytest.raises(ProgramFailed, match=r"exit code 1: got \[redacted\]$"):
        ended.check()
    assert ended.tail == ("got [redacted]",)
