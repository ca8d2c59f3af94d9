"""Tables on a terminal: no wider than that, in colours, and with every letter of the plain text."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from collections import Counter
from pathlib import Path

import pytest

from ds_hessian.cli import main
from tests.cli.test_cli import COMMAND, ROOT, at_step, call, installed
from tests.records.makers import language_model_like, spectrum_of
from tests.tiers import cells

COLOUR = re.compile(r"\x1b\[[\d;]*3[0-7][\d;]*m")


def on_terminal(*arguments: str, columns: int, cwd: Path, **variables: str) -> str:
    """What the command writes to a terminal of so many columns, in a fork of this process."""
    child, terminal = pty.fork()
    if child == 0:
        try:
            termios.tcsetwinsize(1, (24, columns))
            os.chdir(cwd)
            os.environ |= {"TERM": "xterm", **variables}
            for name in {"COLUMNS", "NO_COLOR", "FORCE_COLOR"} - set(variables):
                os.environ.pop(name, None)
            # Open until the fork ends.
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            sys.argv = ["ds-hessian", *arguments]
            main()
        except BaseException:  # click ends the process
            sys.stdout.flush()
        finally:
            os._exit(0)
    written = b""
    try:
        while chunk := os.read(terminal, 4096):
            written += chunk
    except OSError:  # Linux: the other end is closed
        pass
    os.close(terminal)
    os.waitpid(child, 0)
    return written.decode().replace("\r\n", "\n")


def letters(text: str) -> Counter[str]:
    """Without spaces and escapes."""
    return Counter(re.sub(r"\x1b\[[\d;]*m|\s", "", text))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two steps, one of them with a name that rich could take for markup."""
    for name, step in (("s20", 20), ("[red]s30", 30)):
        values = language_model_like(500) * (1 + step / 1000)
        spectrum = spectrum_of(values, m=15, probes=2, noise=1e-3)
        at_step(spectrum, step).save(tmp_path / "run" / name)
    return tmp_path


COMMANDS: dict[str, tuple[str, ...]] = {
    "table": ("table", "run"),
    "compare": ("compare", "run"),
    "plan": ("plan", "-n", "7B", "-r", "64", "--seconds-per-micro-batch", "1.5"),
}
WIDTHS = [(name, columns) for name in COMMANDS for columns in (40, 200)]


@pytest.mark.parametrize(
    "name, columns", cells(WIDTHS, [("table", 40), ("compare", 200), ("plan", 40)])
)
def test_a_table_is_as_wide_as_its_terminal(folder: Path, name: str, columns: int) -> None:
    command = COMMANDS[name]
    found = on_terminal(*command, columns=columns, cwd=folder)
    assert COLOUR.search(found)
    lines = re.sub(r"\x1b\[[\d;]*m", "", found).splitlines()
    tabulated = [line for line in lines if not line.startswith("spectrum of 7,000")]
    assert max(map(len, tabulated)) <= columns
    plain = call(*command, cwd=folder).stdout
    assert letters(plain) <= letters(found)  # a list of each row repeats the names of columns
    figures = re.findall(r"\d\S*", plain)
    assert command[0] != "compare" or all(figure in found for figure in figures)


def test_no_color_and_dumb_terminals_are_respected(folder: Path) -> None:
    assert not COLOUR.search(on_terminal("table", "run", columns=80, cwd=folder, NO_COLOR="1"))
    assert "\x1b" not in on_terminal("table", "run", columns=80, cwd=folder, TERM="dumb")


@pytest.mark.full
def test_a_locale_without_the_letters_gets_others(folder: Path) -> None:
    done = installed("table", "run", cwd=folder, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"largest eigenvalue\s+\d+\.\d+ \? 0\.\d+", done.stdout)


@pytest.mark.full
def test_an_output_that_the_shell_has_closed_gets_nothing(folder: Path) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = ["sh", "-c", f'exec "{COMMAND}" table run >&-']
    done = subprocess.run(command, cwd=folder, env=environment)
    assert done.returncode == 0
