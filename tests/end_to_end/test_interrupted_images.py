"""Ctrl-C while teachers of images are trained: the same command goes on with finished teachers, and charges once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from pate_torch.privacy.ledger import find_account
from tests import ROOT
from tests.worlds import images

MARK = 7.125
"""Value that is written into a finished teacher between the runs. Training from the seed would not return it."""
LONGEST_SECONDS = 300

COMMAND = [
    *(str(ROOT / "train.py"), "dataset=image_folder", "dataset.name=squares", "dataset.path=own"),
    *("dataset.public_path=pool", "dataset.test_path=test", "dataset.size=8", "dataset.channels=1"),
    *("num_teachers=64", "num_queries=20", "mechanism.sigma=4", "query=random", "teacher=logistic"),
    *("teacher.steps=3000", "student=supervised", "student.network=logistic", "student.augment=null"),
    *("student.steps=5", "guide_student.network=logistic", "guide_student.augment=null", "guide_student.steps=5"),
    *("baseline=false", "membership=none", "privacy.opening_budget=50", "quiet=true"),
]
PROGRAM = """
from pate_torch import PATEClassifier
from pate_torch.students.training import Supervised
from pate_torch.teachers.recipe import TeacherRecipe

PATEClassifier(
    epsilon=20.0, account="squares", cap=50.0, classes=["a", "b", "c"], method="teachers", num_teachers=64,
    num_queries=20, teacher=TeacherRecipe(network="logistic", steps=3000, augment=None),
    student=Supervised(network="logistic", steps=5, augment=None),
).fit("own", public="pool")
"""
PROGRAMS = {"train.py": COMMAND, "PATEClassifier": ["program.py"]}


def write_folder(folder: Path, count: int, seed: int) -> None:
    """Write images of three classes into class folders."""
    for row, (image, label) in enumerate(zip(*images(count, seed), strict=True)):
        file = folder / "abc"[label] / f"{row:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(file)


def start(words: list[str], folder: Path) -> subprocess.Popen:
    """Start a program that SIGINT interrupts, in a process group of its own, as a terminal does."""
    environment = os.environ | {"PATE_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore Ctrl-C
    try:
        return subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, start_new_session=True, **pipes)
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for_checkpoint(home: Path, process: subprocess.Popen) -> None:
    """Return as soon as one group of teachers is finished."""
    begin = time.monotonic()
    while not list(home.glob("teachers/.partial-*/teachers_*.safetensors")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() - begin < LONGEST_SECONDS
        time.sleep(0.01)


@pytest.mark.slow(reason="starts two programs that train teachers for some seconds")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_command_goes_on_with_the_finished_teachers_and_charges_once(name, tmp_path):
    for folder, count, seed in (("own", 640, 0), ("pool", 60, 1), ("test", 60, 2)):
        write_folder(tmp_path / folder, count, seed)
    (tmp_path / "program.py").write_text(PROGRAM)
    home = tmp_path / "home"
    with start(PROGRAMS[name], tmp_path) as process:
        wait_for_checkpoint(home, process)
        os.killpg(process.pid, signal.SIGINT)  # a terminal interrupts the worker processes, too
        told = process.communicate(timeout=LONGEST_SECONDS)[0]
    assert process.returncode not in (0, 2), told
    assert "interrupted: nothing was charged to account 'squares'. Repeat the same c" in told
    account = find_account(home, "squares")
    assert account is None or not account.charges
    assert not list(home.glob("teachers/*/group_000000.safetensors"))

    finished = sorted(home.glob("teachers/.partial-*/teachers_*.safetensors"))
    assert 1 <= len(finished) < 4  # groups of 16 teachers; training had not ended
    teachers_by_file = {file: int(file.name.split("_")[1]) for file in finished}
    for file in finished:
        rows = load_file(file)
        bias = next(key for key in rows if key.endswith("bias"))
        rows[bias][3] = MARK
        save_file(rows, file)

    with start(PROGRAMS[name], tmp_path) as process:
        told = process.communicate(timeout=LONGEST_SECONDS)[0]
    assert process.returncode == 0, told
    groups = sorted(home.glob("teachers/*/group_*.safetensors"))
    is_marked_K = torch.cat([(load_file(group)[bias] == MARK).all(1) for group in groups])
    assert torch.nonzero(is_marked_K).flatten().tolist() == [first + 3 for first in teachers_by_file.values()]
    account = find_account(home, "squares")
    assert len(account.charges) == 1 and next(iter(account.charges.values())).is_committed
    assert len(list(home.glob("runs/*/*/*/release/labels.csv"))) == 1
