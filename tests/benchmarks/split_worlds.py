"""A data set that is split anew for each repeat of a replication, and the plan of a replication on it."""

import numpy as np

from pate_torch.data.libsvm import Libsvm
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.partition import ReplaceOne
from pate_torch.queries.base import Random
from pate_torch.queries.disagreement import Disagreement
from pate_torch.students.linear import Logistic
from pate_torch.teachers.training import TeacherRecipe
from tests.run_configs import run_config

ASKED = {"passive": Random(name="passive", shuffle=False), "active": Disagreement()}


def write_signs(folder, count):
    """Rows whose class is the sign of their first feature; a third are of the second class."""
    draw = np.random.default_rng(0)
    y = draw.random(count) < 1 / 3
    rows = [f"{int(c)} 1:{(2 * c - 1) * (0.5 + draw.random()):.3f} 2:{draw.normal():.3f}" for c in y]
    path = folder / "signs.svm"
    path.write_text("\n".join(rows) + "\n")
    facts = {"fractions": (0.8, 0.1, 0.1), "classes": (0, 1), "num_features": 2, "benchmark": True}
    return Libsvm(name="signs", path=str(path), roles="position", **facts)


def plan_of(source, home, student=None, **changes):
    student = student or Logistic()
    recipe = TeacherRecipe(network="logistic", steps=20, batch_size=8, learning_rate=0.1)
    return run_config(
        dataset=source, partition=ReplaceOne(), teacher=recipe, mechanism=GNMax(sigma=1.0), query=ASKED["passive"],
        student=student, guide_student=student, root=home, folder=home / "run", seed=0, num_teachers=1, num_queries=1,
        delta=1e-4, quiet=True, **changes,
    )  # fmt: skip
