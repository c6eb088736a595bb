"""Students: every configured one learns from few labels, repeats itself, and refuses what cannot be learnt from."""

import dataclasses
import inspect
import json
import math

import numpy as np
import pytest
import torch
from hydra import compose
from hydra.utils import instantiate
from sklearn.datasets import make_moons
from sklearn.ensemble import AdaBoostClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from pate_torch import networks
from pate_torch.cli import hydra_config
from pate_torch.core.rng import derive_seed
from pate_torch.privacy.records import DataSpec
from pate_torch.students.adaboost import AdaBoost
from pate_torch.students.bagging import BaggingStudent
from pate_torch.students.base import Student, StudentAlgorithm, StudentTask
from pate_torch.students.fixmatch import Alignment, FixMatch
from pate_torch.students.label_noise import with_label_posteriors
from pate_torch.students.label_spreading import LabelSpreading, select_most_confident
from pate_torch.students.linear_model import ReleasedModel
from pate_torch.students.logistic import Logistic
from pate_torch.students.supervised import Supervised
from pate_torch.students.training import AveragedModel, build_problem, compute_label_loss, iterate_batches
from pate_torch.students.vat import Vat, frozen_statistics
from tests.configurations import list_options
from tests.worlds import IMAGES, Counted, images

CPU = torch.device("cpu")
NAMES = [name for name in list_options("student") if name not in ("none", "same", "released_model")]  # which learn none


def configured(name: str, network: str = "small_cnn", steps: int = 40) -> StudentAlgorithm:
    """A student as its YAML describes it, on a small network and with few steps."""
    with hydra_config.open_configuration():
        chosen = [
            f"student={name}",
            f"recommended.student_network={network}",
            f"recommended.student_steps={steps}",
            "recommended.augment={rotate:0,scale:0,shift:0.5,shear:0}",
            "features=none",
        ]
        node = compose("config", overrides=chosen).student
    return shortened(instantiate(node, _convert_="all"), network, steps)


def shortened(student, network: str, steps: int):
    fields = {field.name for field in dataclasses.fields(student)}
    if "member" in fields:
        return dataclasses.replace(student, member=shortened(student.member, network, steps), members=2)
    options = {"channels": (8, 16), "hidden": 32} if network == "small_cnn" else {}
    small = {"steps": steps, "network_options": options, "batch_size": 16, "unlabeled_batch": 32}
    return dataclasses.replace(student, **{key: value for key, value in small.items() if key in fields})


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two shifted Gaussian clouds in 6 dimensions."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (count,), generator=generator)
    return torch.randn(count, 6, generator=generator) + 2.0 * (2 * y[:, None] - 1), y


ROWS = DataSpec(name="clouds", num_classes=2, input_shape=(6,), class_names=("a", "b"), mean=(0.0,) * 6, std=(2.0,) * 6)


def task(labels: int = 12, spec: DataSpec = IMAGES, **changes) -> tuple[StudentTask, torch.Tensor]:
    make = images if spec is IMAGES else rows
    x, y = make(150, seed=1)
    query = torch.arange(labels)
    return dataclasses.replace(StudentTask(spec, x, query, y[query]), **changes), y


def accuracy(student: Student, make) -> float:
    x, y = make(300, seed=2)
    return float((student.compute_probabilities(x).argmax(1) == y).float().mean())


@pytest.mark.parametrize("name", NAMES)
def test_learns_an_easy_problem_repeats_itself_and_is_rebuilt(name):
    algorithm = configured(name)
    assert isinstance(algorithm, StudentAlgorithm) and algorithm.name == name
    easy, _ = task()
    logged, shown = [], []
    student = algorithm.fit(
        easy, seed=0, device=CPU, progress=lambda *p: shown.append(p), log=lambda *entry: logged.append(entry)
    )
    assert accuracy(student, images) > 0.85  # chance: 1/3
    assert shown[-1][0] == shown[-1][1] and [done for done, _ in shown] == sorted(done for done, _ in shown)
    assert logged and all(math.isfinite(value) for _, value, _ in logged)
    assert sum(map(len, student.curves.values())) == len(logged)

    torch.manual_seed(12345)  # the global generator must not matter
    again = algorithm.fit(easy, seed=0, device=CPU)
    rebuilt = networks.rebuild(json.loads(json.dumps(student.network)))
    rebuilt.load_state_dict(again.module.state_dict())
    x, _ = images(20, seed=3)
    same = Student(student.network, rebuilt, easy.spec).compute_probabilities(x)
    torch.testing.assert_close(same, student.compute_probabilities(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "logistic"])
def test_another_seed_gives_another_student(name):
    easy, _ = task()
    algorithm = configured(name, steps=2)
    first, second = (algorithm.fit(easy, seed=seed, device=CPU).module.state_dict() for seed in (0, 1))
    assert any(not torch.equal(first[key], second[key]) for key in first)


def test_a_selection_of_answers_keeps_what_belongs_to_each():
    easy, y = task(12)
    posterior_QC, round_Q = torch.rand(12, 3), torch.arange(12) // 4
    some = dataclasses.replace(easy, posterior_QC=posterior_QC, round_Q=round_Q).select(torch.tensor([5, 5, 2]))
    assert some.query_Q.tolist() == [5, 5, 2] and torch.equal(some.label_Q, y[[5, 5, 2]])
    assert torch.equal(some.posterior_QC, posterior_QC[[5, 5, 2]]) and some.round_Q.tolist() == [1, 1, 0]
    assert easy.select(torch.arange(12) < 3).round_Q is None


def test_the_released_model_needs_one():
    easy, _ = task()
    with pytest.raises(ValueError, match="method=gradients mechanism=gradient_descent"):
        ReleasedModel().fit(easy, seed=0, device=CPU)


@pytest.mark.parametrize("name", NAMES)
def test_learns_feature_rows(name):
    easy, _ = task(10, ROWS)
    assert accuracy(configured(name, network="mlp").fit(easy, seed=0, device=CPU), rows) > 0.9  # chance: 1/2


@pytest.mark.parametrize("name", NAMES)
def test_a_single_class_or_label_is_learnt_and_no_label_is_refused(name):
    one, y = task(1)
    algorithm = configured(name, steps=20)
    student = algorithm.fit(one, seed=0, device=CPU)
    x, _ = images(40, seed=4)
    assert (student.compute_probabilities(x).argmax(1) == y[0]).all()
    none = dataclasses.replace(one, query_Q=one.query_Q[:0], label_Q=one.label_Q[:0])
    with pytest.raises(ValueError, match="no public point has a released label"):
        algorithm.fit(none, seed=0, device=CPU)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"label_Q": torch.tensor([0, 1, 3])}, "label=3"),
        ({"label_Q": torch.tensor([0, 1, -1])}, "label=-1"),
        ({"query_Q": torch.tensor([0, 1, 150])}, "query=150"),
        ({"label_Q": torch.tensor([0, 1])}, "2 labels for 3 questions"),
    ],
)
def test_a_task_that_does_not_fit_together_is_refused(change, message):
    bad, _ = task(3)
    with pytest.raises(ValueError, match=message):
        build_problem(dataclasses.replace(bad, **change), 0, CPU)


def test_a_student_cannot_be_handed_evaluation_labels():
    fields = {field.name for field in dataclasses.fields(StudentTask)}
    released = {"query_Q", "label_Q", "posterior_QC", "soft", "round_Q", "model"}
    assert fields == {"spec", "pool_x", "guide"} | released
    parameters = set(inspect.signature(StudentAlgorithm.fit).parameters)
    assert parameters == {"self", "task", "seed", "device", "progress", "log"}


def test_the_corrected_loss_is_the_likelihood_of_flipped_labels():
    logits = torch.randn(50, 4, dtype=torch.float64)
    label = torch.arange(50) % 4
    transition = torch.full((4, 4), 0.3 / 3, dtype=torch.float64).fill_diagonal_(0.7)
    expected = -(logits.softmax(1) @ transition).log()[torch.arange(50), label]
    torch.testing.assert_close(compute_label_loss(logits, label, 0.3), expected)
    plain = torch.nn.functional.cross_entropy(logits, label, reduction="none")
    torch.testing.assert_close(compute_label_loss(logits, label, 0.0), plain)


def test_a_firmly_contradicted_label_loses_its_pull():
    logits = torch.tensor([[12.0, 0.0, 0.0]], requires_grad=True)
    pulls = []
    for flip in (0.0, 0.05):
        (gradient,) = torch.autograd.grad(compute_label_loss(logits, torch.tensor([1]), flip).sum(), logits)
        pulls.append(float(gradient.abs().max()))
    assert pulls[0] > 0.99 and pulls[1] < 1e-3


def test_knowing_the_flips_helps_against_wrong_labels():
    """A third of the labels wrong: the corrected student is better on each of three draws."""
    for seed in range(3):
        easy, y = task(90, ROWS)
        wrong = torch.rand(90, generator=torch.Generator().manual_seed(seed)) < 0.33
        noisy = dataclasses.replace(easy, label_Q=torch.where(wrong, 1 - y[:90], y[:90]))
        algorithm = Supervised(network="mlp", steps=150, batch_size=32, label_noise=0.0)
        corrected = dataclasses.replace(algorithm, label_noise=0.33)
        plain_score, score = (accuracy(a.fit(noisy, seed=seed, device=CPU), rows) for a in (algorithm, corrected))
        assert score > plain_score


def test_batches_are_whole_and_pass_over_everything():
    order = iterate_batches(7, 3, torch.Generator().manual_seed(0))
    drawn = torch.cat([next(order) for _ in range(7)])
    assert torch.equal(drawn.view(3, 7).sort(1).values, torch.arange(7).expand(3, 7))
    assert len(next(iterate_batches(2, 5, torch.Generator().manual_seed(0)))) == 5


def test_the_average_is_exponential_with_a_fast_start():
    model = torch.nn.BatchNorm1d(1)
    average, by_hand = AveragedModel(model, 0.5), 1.0
    for step in range(1, 8):
        with torch.no_grad():
            model.weight.fill_(step)
        average.update()
        by_hand += (step - by_hand) * (1 - min(0.5, step / (step + 9)))
    assert float(average.module.weight) == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("name", ["fixmatch", "label_spreading", "supervised", "vat"])
@pytest.mark.parametrize("spec", [IMAGES, ROWS], ids=["images", "rows"])
def test_no_step_waits_for_its_device_or_brings_a_constant_to_it(name, spec):
    easy, _ = task(10, spec)
    network = "small_cnn" if spec is IMAGES else "mlp"
    few, many = (
        Counted.during(lambda s=s: configured(name, network, s).fit(easy, seed=0, device=CPU)) for s in (5, 25)
    )
    assert many["_local_scalar_dense"] <= few["_local_scalar_dense"]  # item(), bool(), float()
    assert many["lift_fresh"] <= few["lift_fresh"]  # torch.tensor(...)


def test_the_first_loss_that_is_not_finite_is_named():
    easy, _ = task()

    class Bursts(Supervised):
        def make_objective(self, problem, average, note):
            loss = super().make_objective(problem, average, note)
            return lambda model, step: loss(model, step) * (math.inf if step == 7 else 1.0)

    for steps in (10, 90):
        with pytest.raises(FloatingPointError, match=r"student loss is inf at step 7: lower student\.learning_rate"):
            Bursts(network="logistic", steps=steps).fit(easy, seed=0, device=CPU)


def test_alignment_restores_the_expected_proportions():
    easy, _ = task()
    posed = build_problem(dataclasses.replace(easy, label_Q=torch.tensor([0, 1, 2] * 4)), 0, CPU)
    align = Alignment(posed, "uniform", decay=0.0)
    skewed = torch.softmax(torch.randn(4000, 3) + torch.tensor([1.5, 0.0, -0.5]), 1)
    before, after = skewed.mean(0), align(skewed).mean(0)
    assert (after - 1 / 3).abs().max() < (before - 1 / 3).abs().max() / 3
    torch.testing.assert_close(align(skewed).sum(1), torch.ones(4000))
    torch.testing.assert_close(Alignment(posed, "none")(skewed), skewed)
    missing = build_problem(dataclasses.replace(easy, label_Q=torch.tensor([0, 1] * 6)), 0, CPU)
    assert Alignment(missing, "uniform").target_C.tolist() == [0.5, 0.5, 0.0]


def test_trust_keeps_the_widest_leads_of_each_class():
    lead = torch.linspace(0.0, 0.9, 10)
    share = torch.cat([torch.stack([0.5 + lead / 2, 0.5 - lead / 2], 1), torch.tensor([[0.1, 0.9]])])
    kept = select_most_confident(share, 0.5)
    assert kept.tolist() == [-1] * 5 + [0] * 5 + [1]


def test_propagated_labels_help_where_few_are_given():
    """Two moons with one label each: the labels alone cut them straight, carried ones follow them round."""
    x, y = make_moons(300, noise=0.06, random_state=0)
    x, y = torch.from_numpy(x).float(), torch.from_numpy(y)
    spec = DataSpec(
        name="moons", num_classes=2, input_shape=(2,), class_names=("a", "b"), mean=(0.5, 0.25), std=(0.9, 0.5)
    )
    query = torch.tensor([int((y == c).nonzero()[0]) for c in range(2)])
    scores = []
    for kind in (Supervised, LabelSpreading):
        algorithm = kind(network="mlp", steps=150, batch_size=8, learning_rate=1e-2)
        student = algorithm.fit(StudentTask(spec, x, query, y[query]), seed=0, device=CPU)
        scores.append(float((student.compute_probabilities(x).argmax(1) == y).float().mean()))
    assert scores[0] < 0.8 < 0.9 < scores[1]


def test_smoothness_leaves_running_statistics_alone():
    model = networks.build("small_cnn", (1, 8, 8), 3).train()
    before = {key: value.clone() for key, value in model.state_dict().items() if "running" in key}
    with frozen_statistics(model):
        model(torch.randn(16, 1, 8, 8))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    model(torch.randn(16, 1, 8, 8))
    assert any(not torch.equal(model.state_dict()[key], value) for key, value in before.items())


def test_the_adversary_finds_a_worse_direction_than_chance():
    generator = torch.Generator().manual_seed(0)
    model = networks.initialize(networks.build("mlp", (6,), 2), generator)
    with torch.no_grad():
        list(model.parameters())[-2].normal_(generator=generator)
    x = torch.randn(64, 6, generator=generator)
    adversarial = Vat(radius=0.5)._compute_smoothness(model, x, generator).item()
    here = model(x).log_softmax(1)
    noise = torch.randn(x.shape, generator=generator)
    noise = 0.5 * noise / noise.square().mean(1, keepdim=True).sqrt()
    there = model(x + noise).log_softmax(1)
    chance = torch.nn.functional.kl_div(there, here, log_target=True, reduction="batchmean").item()
    assert adversarial > 1.5 * chance


@pytest.mark.parametrize("classes", [[0, 1], [0, 1, 2], [0, 2]])
def test_the_linear_student_is_scikit_learn_s(classes):
    generator = np.random.default_rng(0)
    label = np.array(classes * 10)
    x = (generator.normal(size=(len(label), 6)) + label[:, None]).astype(np.float32)
    spec = dataclasses.replace(ROWS, num_classes=3, class_names=("a", "b", "c"), std=(1.0,) * 6)
    posed = StudentTask(spec, torch.from_numpy(x), torch.arange(len(label)), torch.from_numpy(label))
    student = Logistic(ridge=0.5).fit(posed, seed=0, device=CPU)
    reference = LogisticRegression(C=2.0, max_iter=2000, tol=1e-7).fit(x.astype(np.float64), label)
    ours = student.compute_probabilities(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(ours[:, classes], reference.predict_proba(x), atol=1e-6)
    assert ours[:, [c for c in range(3) if c not in classes]].sum() < 1e-9


def vectors(right: float, count: int = 400) -> tuple[StudentTask, torch.Tensor, torch.Tensor]:
    """Four classes of rows of forty numbers, five of which tell them apart; so many of the labels are right."""
    generator = torch.Generator().manual_seed(0)
    center = 1.6 * torch.randn(4, 5, generator=generator)
    y = torch.randint(4, (3000,), generator=generator)
    x = torch.randn(3000, 40, generator=generator)
    x[:, :5] += center[y]
    label = y[:count].clone()
    bad = torch.rand(count, generator=generator) >= right
    label[bad] = (label[bad] + torch.randint(1, 4, (int(bad.sum()),), generator=generator)) % 4
    spec = dataclasses.replace(
        ROWS, num_classes=4, class_names=tuple("abcd"), input_shape=(40,), mean=(0.0,) * 40, std=(1.0,) * 40
    )
    return StudentTask(spec, x[:1500], torch.arange(count), label), x[1500:], y[1500:]


@pytest.mark.parametrize("right", [pytest.param(0.5, marks=pytest.mark.slow), 0.9])
@pytest.mark.parametrize("name", ["supervised", "vat", "fixmatch", "label_spreading", "logistic"])
def test_students_of_vectors_are_as_good_as_a_linear_model_of_the_same_labels(name, right):
    posed, x, y = vectors(right)
    known, label = posed.pool_x[posed.query_Q].numpy(), posed.label_Q.numpy()
    models = [LogisticRegression(C=10.0**k, max_iter=300) for k in range(-4, 2)]
    linear = max(models, key=lambda model: cross_val_score(model, known, label).mean()).fit(known, label).score(x, y)
    student = configured(name, "mlp", steps=300)
    ours = float((student.fit(posed, seed=0, device=CPU).predict(x) == y).double().mean())
    assert ours > linear - 0.025


def test_an_opinion_finds_how_many_labels_are_wrong_and_mends_some():
    posed, _, _ = vectors(0.6)
    truth = vectors(1.0)[0].label_Q
    mended = with_label_posteriors(build_problem(posed, 0, CPU), include_unqueried=False)
    before, after = ((label == truth).double().mean() for label in (posed.label_Q, mended.posterior_QC.argmax(1)))
    assert after > before + 0.05
    assert torch.equal(mended.query_Q, posed.query_Q) and torch.equal(mended.label_Q, posed.label_Q)
    assert torch.allclose(mended.posterior_QC.sum(1), torch.ones(len(truth)), atol=1e-5)
    everywhere = with_label_posteriors(build_problem(posed, 0, CPU), include_unqueried=True)
    assert len(everywhere.query_Q) == len(posed.pool_x)


def test_there_is_no_opinion_on_few_labels_nor_on_labels_that_nothing_foretells():
    posed, _, _ = vectors(1.0, 49)
    problem = build_problem(posed, 0, CPU)
    assert with_label_posteriors(problem, include_unqueried=True) is problem
    posed, _, _ = vectors(1.0)
    one = dataclasses.replace(posed, label_Q=torch.zeros(400, dtype=torch.int64))
    problem = build_problem(one, 0, CPU)
    assert with_label_posteriors(problem, include_unqueried=True) is problem


@pytest.mark.slow
def test_the_luck_of_the_best_of_many_models_is_no_opinion():
    """Of labels that have nothing to do with the points some model foretells a few more than the commonest one does."""
    posed, _, _ = vectors(1.0, 100)
    opinions = 0
    for seed in range(20):
        label_Q = torch.randint(2, (100,), generator=torch.Generator().manual_seed(seed))
        problem = build_problem(dataclasses.replace(posed, label_Q=label_Q), 0, CPU)
        opinions += with_label_posteriors(problem, include_unqueried=False) is not problem
    assert opinions <= 5


def test_a_vote_pools_the_members_of_whom_the_first_is_the_student_alone():
    easy, _ = task()
    member = Supervised(steps=3)
    student = BaggingStudent(member=member, members=3).fit(easy, seed=0, device=CPU)
    alone = member.fit(easy, seed=0, device=CPU).module.state_dict()
    for name, value in student.module.members[0].state_dict().items():
        assert torch.equal(value, alone[name])
    x, _ = images(20, seed=5)
    normal = easy.spec.normalize(x)
    mean = torch.stack([member(normal).log_softmax(1) for member in student.module.members]).mean(0)
    torch.testing.assert_close(student.compute_probabilities(x), mean.softmax(1))
    weights = [next(member.parameters()) for member in student.module.members]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


@pytest.mark.parametrize("classes", [2, 3])
def test_boosted_stumps_are_scikit_learns(classes):
    """Probabilities of fresh points, of labels that no stump fits, and of a class without labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    y = (x[:, 0].abs() * 1.5 + 0.2 * torch.randn(400, generator=generator)).long().clamp(max=classes - 1)
    names = tuple("abcd"[: classes + 1])
    spec = DataSpec(
        name="bands", num_classes=classes + 1, input_shape=(3,), class_names=names, mean=(0.1,) * 3, std=(2.0,) * 3
    )
    query = torch.arange(200)
    fitted = AdaBoost(iterations=30).fit(StudentTask(spec, x, query, y[query]), seed=3, device=CPU)
    rows_QD = spec.normalize(x).numpy()
    twin = AdaBoostClassifier(n_estimators=30, random_state=derive_seed(3, "student", "adaboost") % 2**32)
    twin.fit(rows_QD[:200], y[:200].numpy())
    found = fitted.compute_probabilities(x)
    np.testing.assert_allclose(found[:, :classes], twin.predict_proba(rows_QD), atol=1e-6)
    assert found[:, classes].max() < 1e-9
    alone = AdaBoost(iterations=1).fit(StudentTask(spec, x, query, y[query]), seed=3, device=CPU)
    right = [float((s.predict(x[200:]) == y[200:]).float().mean()) for s in (fitted, alone)]
    assert right[0] > right[1] + 0.1 or classes == 3  # SAMME's stumps need more rounds there
    one = AdaBoost().fit(StudentTask(spec, x, query[:3], torch.ones(3, dtype=torch.int64)), seed=0, device=CPU)
    assert (one.predict(x) == 1).all()


def test_boosted_stumps_learn_from_scores():
    """Of scores a class counts by its share: nine to one for the class is nine labels to one."""
    x = torch.arange(20.0)[:, None].repeat(1, 6)
    share = torch.where(x[:, :1] < 10, torch.tensor([[0.9, 0.1]]), torch.tensor([[0.1, 0.9]]))
    given = StudentTask(ROWS, x, torch.arange(20), share.argmax(1), posterior_QC=share, soft=True)
    assert (AdaBoost().fit(given, seed=0, device=CPU).predict(x) == (x[:, 0] >= 10)).all()


@pytest.mark.parametrize(
    "make,key",
    [
        (lambda: AdaBoost(iterations=0), "student.iterations"),
        (lambda: Supervised(steps=0), "student.steps"),
        (lambda: Supervised(ema=1.2), "student.ema"),
        (lambda: Supervised(precision="float16"), "student.precision"),
        (lambda: FixMatch(threshold=2), "student.threshold"),
        (lambda: FixMatch(alignment="uniforn"), "Did you mean 'uniform'"),
        (lambda: FixMatch(augment={"rotate": 500}), "augment.rotate"),
        (lambda: Vat(radius=0), "student.radius"),
        (lambda: Logistic(ridge=0), "student.ridge"),
        (lambda: BaggingStudent(member=Supervised(), members=0), "student.members"),
    ],
)
def test_bad_settings_are_named(make, key):
    with pytest.raises(ValueError, match=key):
        make()
