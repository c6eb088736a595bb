"""The command ends without a traceback where its output is closed or its user interrupts it."""

import subprocess
import sys

import pytest

from pate_torch.cli import main
from tests import ROOT


@pytest.mark.parametrize("redirection", [">&-", "| head -c 0"])
def test_a_closed_output_ends_without_a_traceback(redirection):
    command = f"{sys.executable} -m pate_torch --help {redirection}"
    finished = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in finished.stderr


def test_an_interrupt_ends_in_one_line(capsys):
    def interrupt():
        raise KeyboardInterrupt

    assert main.run_command(interrupt) == 130
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "stays charged" in message
