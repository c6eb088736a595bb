"""A tiny golden run, which a refactor must not change.

Integers (votes, labels) are compared exactly, weights within a tolerance: processors round differently, even those with
the same vector instructions. Bit for bit a run is compared with a second one on the same machine.
To accept an intended change: ``python tests/test_golden.py``, and a line in LOG.md saying why.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from run_configs import run_config
from safetensors.torch import load_file, save_file

from pate_torch import pipeline
from pate_torch.data.digits import Digits
from pate_torch.data.partition import AddRemove
from pate_torch.mechanisms.gaussian import Gaussian
from pate_torch.queries.random import Random
from pate_torch.students.supervised import Supervised
from pate_torch.teachers.training import TeacherRecipe

GOLDEN = Path(__file__).parent / "golden" / "digits.json"
CLOSE = 1e-4
"""Of weights: twenty steps move them by .04 at most."""


def run(home: Path, learning_rate: float = 2e-3) -> dict:
    student = Supervised(network="mlp", steps=20, batch_size=16, augment=None)
    pipeline.run(
        run_config(
            dataset=Digits(),
            partition=AddRemove(),
            # Every number is written out: a better default elsewhere is no change here.
            teacher=TeacherRecipe(
                network="mlp",
                options={"hidden": [16]},
                steps=20,
                batch_size=8,
                learning_rate=learning_rate,
                optimiser="adam",
                weight_decay=0.0,
                label_smoothing=0.0,
                schedule="cosine",
                backend="vectorised",
                chunk=5,
            ),
            mechanism=Gaussian(sigma=4.0),
            query=Random(),
            student=student,
            guide_student=student,
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
        "votes": load_file(private / "votes.safetensors")["counts_QC"].tolist(),
        "labels": (released / "labels.csv").read_text().splitlines(),
        "weights": {"teachers": sampled(teachers), "student": sampled(released / "student.safetensors")},
        "digests": [digest(teachers), digest(released / "student.safetensors")],
    }


def sampled(path: Path) -> dict[str, list[float]]:
    """Thirty-two weights of every tensor, from its first to its last, to eight digits."""
    found = {}
    for name, tensor in sorted(load_file(path).items()):
        flat = tensor.double().flatten()
        place = torch.linspace(0, len(flat) - 1, min(32, len(flat))).long()
        found[name] = [float(f"{value:.8g}") for value in flat[place].tolist()]
    return found


def furthest(one: dict, other: dict) -> float:
    """The largest distance of two weights of one name and place."""
    assert {k: list(v) for k, v in one.items()} == {k: list(v) for k, v in other.items()}
    return max(
        abs(a - b)
        for model in one
        for name in one[model]
        for a, b in zip(one[model][name], other[model][name], strict=True)
    )


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
    assert furthest(found["weights"], golden["weights"]) < CLOSE


def test_a_little_more_learning_would_be_noticed(found, tmp_path):
    """Steps longer by 2 % move weights by ten times what processors differ in."""
    changed = run(tmp_path, learning_rate=2.04e-3)
    assert furthest(found["weights"], changed["weights"]) > CLOSE


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
        kept = {key: value for key, value in run(Path(home)).items() if key != "digests"}
        GOLDEN.write_text(json.dumps(kept) + "\n")
