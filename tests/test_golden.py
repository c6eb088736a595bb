"""A tiny golden run: a refactor must not change one bit of it on a CPU of the same kind.

Integers (votes, labels) are compared on every machine. Weights are compared by hash where the CPU's vector
instructions are those the golden file was made with: other instructions round differently.
To accept an intended change: ``python tests/test_golden.py``, and a line in LOG.md saying why.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pate_torch import pipeline
from pate_torch.data.digits import Digits
from pate_torch.data.partition import AddRemove
from pate_torch.mechanisms.gaussian import Gaussian
from pate_torch.queries.random import Random
from pate_torch.students.supervised import Supervised
from pate_torch.teachers.training import TeacherRecipe

GOLDEN = Path(__file__).parent / "golden" / "digits.json"


def run(home: Path) -> dict:
    student = Supervised(network="mlp", steps=20, batch_size=16, augment=None)
    pipeline.run(
        pipeline.Plan(
            source=Digits(),
            partition=AddRemove(),
            # Every number is written out: a better default elsewhere is no change here.
            recipe=TeacherRecipe(
                network="mlp",
                options={"hidden": [16]},
                steps=20,
                batch_size=8,
                learning_rate=2e-3,
                optimiser="adam",
                weight_decay=0.0,
                label_smoothing=0.0,
                schedule="cosine",
                backend="vectorised",
                chunk=5,
            ),
            mechanism=Gaussian(sigma=4.0),
            strategy=Random(),
            student=student,
            refit=student,
            root=home,
            folder=home / "runs" / "digits" / "gaussian" / "golden",
            seed=0,
            num_teachers=10,
            num_queries=20,
            delta=1e-4,
            insecure_noise_seed=0,
            opening_budget=100.0,
            quiet=True,
        )
    )
    released, private = home / "runs/digits/gaussian/golden/release", home / "runs/digits/gaussian/golden/private"
    (teachers,) = home.glob("teachers/*/ensemble.safetensors")
    return {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__.split("+")[0],
        "votes": load_file(private / "votes.safetensors")["counts_QC"].tolist(),
        "labels": (released / "labels.csv").read_text().splitlines(),
        "teachers": digest(teachers),
        "student": digest(released / "student.safetensors"),
    }


def digest(path: Path) -> str:
    tensors = load_file(path)
    state = hashlib.sha256()
    for name in sorted(tensors):
        state.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return state.hexdigest()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(tmp_path_factory.mktemp("golden"))


def test_two_runs_are_bit_identical(found, tmp_path):
    assert run(tmp_path) == found


def test_the_golden_run_is_unchanged(found):
    golden = json.loads(GOLDEN.read_text())
    assert found["votes"] == golden["votes"]
    assert found["labels"] == golden["labels"]
    if (found["cpu"], found["torch"]) == (golden["cpu"], golden["torch"]):
        assert (found["teachers"], found["student"]) == (golden["teachers"], golden["student"])


def test_one_weight_would_be_noticed(found, tmp_path):
    """The digest sees a change in the last bit of one weight."""
    file, weight = tmp_path / "weights.safetensors", torch.ones(3)
    save_file({"w": weight}, file)
    before = digest(file)
    save_file({"w": torch.nextafter(weight, torch.tensor([2.0, 1.0, 1.0]))}, file)
    assert digest(file) != before


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(run(Path(home))) + "\n")
