"""Questions asked in several rounds: which come next, how far each round's answers are believed, reading them again."""

import json

import pytest
import torch

from benchmarks.fonts.glyphs import Glyphs
from pate_torch import pipeline
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.partition import AddRemove
from pate_torch.privacy.records import NoisyCounts, Release
from pate_torch.queries.random import Margin
from pate_torch.release.store import write
from pate_torch.students.supervised import Supervised
from pate_torch.students.task import compute_label_posterior, make_student_task
from pate_torch.teachers.training import TeacherRecipe
from tests.run_configs import changed, run_config

SOURCE = Glyphs(private=320, public=120, test=60, num_classes=3, size=12, shift=0.5, rotate=12, noise=0.1)
STUDENT = Supervised(network="small_cnn", network_options={"channels": [4, 8], "hidden": 16}, steps=20, batch_size=16)


@pytest.fixture(scope="module")
def data():
    return SOURCE.load()


@pytest.fixture
def plan(tmp_path):
    return run_config(
        dataset=SOURCE,
        partition=AddRemove(),
        teacher=TeacherRecipe(network="logistic", steps=20, batch_size=8, learning_rate=0.02, backend="vectorized"),
        mechanism=GNMax(sigma=1.0, counts=True),
        query=Margin(rounds=2),
        student=STUDENT,
        guide_student=STUDENT,
        root=tmp_path,
        folder=tmp_path / "runs/glyphs/gaussian/first",
        seed=0,
        num_teachers=8,
        num_queries=30,
        delta=1e-4,
        opening_budget=200.0,
        quiet=True,
    )


def test_counts_are_believed_round_by_round(data):
    draw = torch.Generator().manual_seed(0)
    noise = (5 * torch.randn(12, 3, generator=draw)).round().long()
    leads = torch.tensor([80] * 6 + [4] * 6)
    counts = torch.nn.functional.one_hot(torch.arange(12) % 3, 3) * leads[:, None] + noise
    noisy = NoisyCounts(counts, 5.0)
    release = Release("r", torch.arange(12), counts.argmax(1), (), (), noisy, queries_per_round=(6, 6))
    first, second = (compute_label_posterior(NoisyCounts(part, 5.0)) for part in counts.split(6))
    assert torch.equal(make_student_task(data.spec, data.pool, release).posterior_QC, torch.cat([first, second]))
    assert not torch.allclose(
        make_student_task(data.spec, data.pool, release).posterior_QC, compute_label_posterior(noisy)
    )


def test_a_run_of_two_rounds_is_recorded_and_learnt_from_again(plan):
    report = pipeline.run(plan)
    record = json.loads((plan.folder / "release/release.json").read_text())
    assert record["queries_by_round"] == [15, 15] and record["rounds"] == 2
    again = changed(plan, labels=record["release_id"], folder=plan.folder.with_name("again"))
    assert pipeline.run(again).claim.epsilon == report.claim.epsilon
    students = [(p.folder / "release/student.safetensors").read_bytes() for p in (plan, again)]
    assert students[0] == students[1]
    file = plan.folder / "release/release.json"
    for wrong in ([15, 14], [31, -1]):
        file.write_text(json.dumps(record | {"queries_by_round": wrong}))
        with pytest.raises(ValueError, match="edited"):
            pipeline.run(changed(plan, labels=record["release_id"], folder=plan.folder.with_name("new")))


def test_a_release_without_rounds_has_one(plan, tmp_path):
    release = Release("r", torch.arange(4), torch.zeros(4, dtype=torch.int64), (), ())
    assert release.round_Q.tolist() == [0] * 4
    assert write(tmp_path / "release", release, {}, SOURCE.load().spec)["queries_by_round"] == [4]
