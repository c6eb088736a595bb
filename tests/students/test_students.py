"""Every configured student learns from few labels, repeats itself, and refuses what cannot be learned from."""

import dataclasses
import inspect
import json
import math

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from pate_torch import networks
from pate_torch.students.base import Student, StudentAlgorithm, StudentTask
from pate_torch.students.linear import Logistic
from pate_torch.students.self_training import PooledStudent, SelfTraining
from pate_torch.students.semi_supervised import FixMatch, Vat
from pate_torch.students.training import Supervised
from tests.students.tasks import CPU, NAMES, ROWS, compute_accuracy, configure, make_task, vectors
from tests.worlds import Counted, images

GRADIENT_STUDENTS = ["fixmatch", "supervised", "vat"]


@pytest.mark.parametrize("name", NAMES)
def test_learns_an_easy_problem_logs_it_and_is_rebuilt_from_its_description(name):
    algorithm, (task, _) = configure(name), make_task()
    assert isinstance(algorithm, StudentAlgorithm) and algorithm.name == name
    logged, progress = [], []
    student = algorithm.fit(
        task,
        seed=0,
        device=CPU,
        progress=lambda *done_and_total: progress.append(done_and_total),
        log=lambda *entry: logged.append(entry),
    )
    assert compute_accuracy(student) > 0.85  # chance: 1/3
    assert progress[-1][0] == progress[-1][1] and progress == sorted(progress)
    assert logged and all(math.isfinite(value) for _, value, _ in logged)
    rebuilt, x = networks.rebuild(json.loads(json.dumps(student.network))), images(20, seed=3)[0]
    rebuilt.load_state_dict(student.module.state_dict())
    again = Student(student.network, rebuilt, task.spec).compute_probabilities(x)
    torch.testing.assert_close(again, student.compute_probabilities(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_repeats_itself_and_depends_on_the_seed(name):
    algorithm = configure(name, steps=2)
    states = []
    for seed in (0, 1, 0):
        torch.manual_seed(len(states))  # the global generator must not matter
        states.append(algorithm.fit(make_task()[0], seed=seed, device=CPU).module.state_dict())
    first, other, again = (torch.cat([value.flatten().double() for value in state.values()]) for state in states)
    assert torch.equal(first, again) and torch.equal(first, other) == (name in ("logistic", "label_spreading"))


@pytest.mark.parametrize("name", NAMES)
def test_learns_feature_rows_and_a_single_label_and_refuses_none(name):
    student = configure(name, network="mlp", steps=20).fit(make_task(10, ROWS)[0], seed=0, device=CPU)
    assert compute_accuracy(student) > 0.9  # chance: 1/2
    one, y = make_task(1, ROWS)
    student = configure(name, network="mlp", steps=10).fit(one, seed=0, device=CPU)
    assert (student.predict(one.pool_x) == y[0]).all() and student.predict(one.pool_x[:0]).shape == (0,)
    with pytest.raises(ValueError, match="no public point has a released label"):
        configure(name).fit(make_task(0)[0], seed=0, device=CPU)


@pytest.mark.parametrize("name", GRADIENT_STUDENTS)
def test_no_step_waits_for_its_device_or_brings_a_constant_to_it(name):
    task, _ = make_task(10, ROWS)
    few, many = (Counted.during(lambda s=s: configure(name, "mlp", s).fit(task, seed=0, device=CPU)) for s in (3, 8))
    assert many["_local_scalar_dense"] <= few["_local_scalar_dense"]  # item(), bool(), float()
    assert many["lift_fresh"] <= few["lift_fresh"]  # torch.tensor(...)


@pytest.mark.slow(reason="replication: students of noisy labels, 300 steps each")
@pytest.mark.parametrize("right", [0.5, 0.9])
@pytest.mark.parametrize("name", [*GRADIENT_STUDENTS, "logistic"])
def test_students_of_vectors_are_as_good_as_a_linear_model_of_the_same_labels(name, right):
    task, x, y = vectors(right)
    known, label = task.pool_x[task.query_Q].numpy(), task.label_Q.numpy()
    models = [LogisticRegression(C=10.0**k, max_iter=300) for k in range(-4, 2)]
    linear = max(models, key=lambda model: cross_val_score(model, known, label).mean()).fit(known, label).score(x, y)
    ours = configure(name, "mlp", steps=300).fit(task, seed=0, device=CPU).predict(x)
    assert float((ours == y).double().mean()) > linear - 0.025


def test_a_student_cannot_be_handed_evaluation_labels():
    released = {"query_Q", "label_Q", "posterior_QC", "soft", "round_Q", "model", "noisy_counts", "frequency_C"}
    assert {field.name for field in dataclasses.fields(StudentTask)} == {"spec", "pool_x", "guide", "search"} | released
    parameters = set(inspect.signature(StudentAlgorithm.fit).parameters)
    assert parameters == {"self", "task", "seed", "device", "progress", "log"}


@pytest.mark.parametrize(
    "make,key",
    [
        (lambda: Supervised(steps=0), "student.steps"),
        (lambda: Supervised(ema=1.2), "student.ema"),
        (lambda: Supervised(precision="float16"), "student.precision"),
        (lambda: Supervised(label_noise=2), "student.label_noise"),
        (lambda: FixMatch(threshold=2), "student.threshold"),
        (lambda: FixMatch(alignment="uniforn"), "Did you mean 'uniform'"),
        (lambda: FixMatch(augment={"rotate": 500}), "augment.rotate"),
        (lambda: Vat(radius=0), "student.radius"),
        (lambda: Logistic(ridge=0), "student.ridge"),
        (lambda: PooledStudent(member=Supervised(), members=0), "student.members"),
        (lambda: PooledStudent(member=3), "student.member=3.*_target_"),
        (lambda: SelfTraining(first_student=Supervised(), later_students=None), "student.later_students=None"),
    ],
)
def test_bad_settings_are_named(make, key):
    with pytest.raises(ValueError, match=key):
        make()


def test_a_pool_holds_members_of_which_the_first_is_the_student_alone():
    task, _ = make_task()
    member = Supervised(steps=3)
    student = PooledStudent(member=member, members=3).fit(task, seed=0, device=CPU)
    alone = member.fit(task, seed=0, device=CPU).module.state_dict()
    assert all(torch.equal(value, alone[name]) for name, value in student.module.members[0].state_dict().items())
    x, _ = images(20, seed=5)
    mean = torch.stack([one(task.spec.normalize(x)).log_softmax(1) for one in student.module.members]).mean(0)
    torch.testing.assert_close(student.compute_probabilities(x), mean.softmax(1))
    weights = [next(one.parameters()) for one in student.module.members]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
