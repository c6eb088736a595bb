"""``pate learn``: what is charged, what is released and what is refused; the released rules; the audit; the numbers."""

import csv
import io
import json

import numpy as np
import pytest
import torch

from pate_torch.accounting import accountant as accounting
from pate_torch.cli import predict
from pate_torch.cli.learn import main
from pate_torch.learn import student as students
from pate_torch.learn.algorithms import ALGORITHMS, plan_events
from pate_torch.learn.audit import audit, make_neighbor_problem
from pate_torch.learn.problem import LearnOptions, make_problems
from pate_torch.pac import exponential, semi_private
from pate_torch.pac.classes import HalfPlanes, Intervals, Stumps, Thresholds
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import ReplaceOne
from pate_torch.privacy.records import Dataset, DataSpec, Evaluation, PrivateRecords, PublicPool
from pate_torch.students.store import load_student
from tests import ROOT
from tests.end_to_end.documents import table as table_of

LOOSE = ("--below-guarantee", "--constants", "sharp")


def table(path, count, names, labeled=True):
    """Points in the unit square, whose class the first coordinate decides."""
    generator = np.random.default_rng(len(names) + count)
    lines = ["age,dose" + ",ill" * labeled]
    for x, z in generator.random((count, 2)).round(3):
        lines.append(f"{x},{z}" + (f",{names[min(int(x * len(names)), len(names) - 1)]}" if labeled else ""))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PATE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def settings(names=("no", "yes"), private=3000):
    """Arguments of a table of so many private records, with public and test points in files of their own."""
    from pathlib import Path

    table(Path("people.csv"), private, names)
    table(Path("public.csv"), 60, names, labeled=False)
    table(Path("test.csv"), 200, names)
    return [
        "people.csv", "dataset.label=ill", "dataset.name=people", "dataset.public_path=public.csv",
        "dataset.test_path=test.csv", f"dataset.classes=[{','.join(names)}]", "privacy.delta=1e-4", "quiet=true",
    ]  # fmt: skip


def charges(home):
    with Ledger(home / "ledger.sqlite") as ledger:
        return list(ledger.get_charges("people").values()) if ledger.list_accounts() else []


def release(home):
    (folder,) = (home / "runs" / "people").glob("*/*/release")
    return folder


@pytest.mark.parametrize(
    "name,asked",
    [
        ("sspp", {"epsilon": 1.0}),
        ("relabeled", {"epsilon": 3.0}),
        ("convex", {"epsilon": 2.0}),
        *(
            pytest.param(name, {"epsilon": epsilon}, marks=pytest.mark.slow)
            for name, epsilon in [
                *(("exponential", 1.0), ("boosted", 1.0), ("representation", 1.0)),
                *(("df18", 4.0), ("unv-priv-cl", 2.0), ("private-prediction", 8.0)),
            ]
        ),
    ],
)
def test_it_charges_what_it_quoted_and_releases_what_predict_applies(name, asked, home, capsys):
    flags = [part for key, value in asked.items() for part in (f"--{key}", str(value))]
    assert main([name, *settings(), *flags, *LOOSE, "--first", "5"]) == 0
    (charge,) = charges(home)
    assert charge.is_committed and charge.purpose == "hypothesis or its answers"
    statement = json.loads((release(home) / "privacy.json").read_text())
    guarantee = statement["guarantee"]
    assert statement["private"] and guarantee["adjacency"] == "replace_one" and guarantee["unit"] == "record"
    assert (
        guarantee["epsilon"]
        == accounting.compute_guarantee(charge.reserved_events, 1e-4).epsilon
        <= asked["epsilon"] * (1 + 1e-9)
    )
    assert statement["mechanism"]["name"] == name
    capsys.readouterr()
    import sys

    sys.argv = ["pate predict"]
    assert predict.main([str(release(home).parent), "test.csv"]) == 0
    told = [row["label"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))]
    with open("test.csv") as file:
        truth = [row["ill"] for row in csv.DictReader(file)]
    assert np.mean([a == b for a, b in zip(told, truth, strict=True)]) > (0.6 if name == "private-prediction" else 0.85)


def test_several_classes_are_charged_in_one_reservation_at_equal_shares(home):
    assert main(["sspp", *settings(("a", "b", "c")), "--epsilon", "3", *LOOSE]) == 0
    (found,) = charges(home)
    assert found.is_committed and [event.eta for event in found.reserved_events] == pytest.approx([1.0] * 3)
    statement = json.loads((release(home) / "privacy.json").read_text())
    assert len(statement["composition"]["parts"]) == 1 and statement["guarantee"]["epsilon"] <= 3
    assert json.loads((release(home) / "summary.json").read_text())["student_accuracy"] > 0.6
    student = load_student(release(home).parent)
    assert student.predict_names({"age": [0.05, 0.95], "dose": [0.5, 0.5]}) == ["a", "c"]


def test_a_hypothesis_that_was_paid_for_is_found_by_the_same_call(home, monkeypatch):
    given = ["sspp", *settings(), "--epsilon", "1", *LOOSE]
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr("pate_torch.session.write_release", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        main(given)
    assert main(given) == 0 and len(charges(home)) == 1
    assert len(list(home.glob("runs/*/*/*/release/summary.json"))) == 1
    assert main(given) == 0 and len(charges(home)) == 2


def test_the_statement_holds_what_the_owner_says(home):
    home.mkdir()
    (home / "owner.yaml").write_text("people:\n  contact: the desk\n  pool: {name: a survey}\n")
    assert main(["sspp", *settings(), "--epsilon", "1", *LOOSE, "privacy.chosen_by=public data"]) == 0
    statement = json.loads((release(home) / "privacy.json").read_text())
    assert statement["owner"]["contact"] == "the desk" and statement["public_assets"][0]["name"] == "a survey"
    assert statement["declared_values"]["classes"] == "declared by the owner"
    assert statement["chosen_by"] == "public data"


def test_labels_that_are_mostly_noise_are_told_of(home, capsys):
    given = [word for word in settings() if word != "quiet=true"]
    assert main(["relabeled", *given, "--epsilon", ".3", "--shard", "30", *LOOSE]) == 0
    assert "Noise outweighs the votes" in capsys.readouterr().err


def test_what_is_not_promised_is_refused_with_the_n_it_takes_and_nothing_is_charged(home, capsys):
    given = settings()
    for name in ("sspp", "ag-priv-cl", "relabeled", "private-predictor"):
        assert main([name, *given]) == 2
        said = capsys.readouterr().err
        assert "n >= " in said and said.count("\n") == 1, said
    assert not (home / "ledger.sqlite").exists()
    assert main(["exponential", *given, "--alpha", ".2"]) == 0  # promised for so many: nothing to wave through


@pytest.mark.parametrize(
    "change,said",
    [
        (["partition=add_remove"], "partition='add_remove'"),
        (["dataset.group=dose"], "partition"),
        (["other.csv"], "is a second table"),
        (["--points", "1000"], "points=1000: there are 60 public points only"),
        (["--hypotheses", "thresholds"], "takes 1 feature"),
        (["--delta", ".5", "--epsilon", "3"], "and the account's is 1e-4"),
        (["privacy.budget_epsilon=.1"], "Take a smaller --epsilon"),
        (["noise=discrete"], "noise"),
        (["--alpha", "2"], "alpha=2"),
    ],
)
def test_choices_that_cannot_be_are_refused_before_a_charge(change, said, home, capsys):
    assert main(["relabeled", *settings(private=1500), *change, "--below-guarantee"]) == 2
    assert said in capsys.readouterr().err
    assert charges(home) == []


def test_stability_is_no_epsilon_and_a_data_set_is_needed(home, capsys):
    assert main(["stable", *settings(), "--below-guarantee"]) == 2
    assert "stability without an epsilon" in capsys.readouterr().err
    assert main(["sspp", "--epsilon", "1"]) == 2 and "table=None" in capsys.readouterr().err
    assert main(["sspp", "dataset=digits"]) == 2 and "no rows of features" in capsys.readouterr().err
    assert not (home / "ledger.sqlite").exists()


def test_seeded_noise_protects_nobody(home):
    assert main(["sspp", *settings(private=300), "--below-guarantee", "insecure_noise_seed=1"]) == 0
    statement = json.loads((release(home) / "privacy.json").read_text())
    assert statement["private"] is False and statement["guarantee"]["epsilon"] is None


def test_a_release_lists_the_files_that_are_there(home):
    assert main(["exponential", *settings(private=300), "--below-guarantee"]) == 0
    folder = release(home)
    card = (folder / "README.md").read_text()
    assert {file.name for file in folder.iterdir()} == {
        "README.md", "SHA256SUMS", "privacy.json", "report.html", "student.safetensors", "summary.json"
    }  # fmt: skip
    assert "labels.csv" not in card and "release.json" not in card and "trained by exponential" in card


# --- problems -------------------------------------------------------------------------------------------------------


def data_of(x, y, num_classes=2):
    width = x.shape[1]
    spec = DataSpec(
        name="points", num_classes=num_classes, input_shape=(width,), class_names=tuple(map(str, range(num_classes))),
        mean=(0.5,) * width, std=(0.3,) * width,
    )  # fmt: skip
    pool = torch.rand(40, width, generator=torch.Generator().manual_seed(1))
    private = PrivateRecords.from_rows(
        torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y), np.arange(len(y)).astype(str)
    )
    return Dataset(spec, private, PublicPool(pool), Evaluation(pool, torch.zeros(40, dtype=torch.int64)))


def facts_of(data):
    return DatasetFacts.from_dataset(data, ReplaceOne())


def test_a_replaced_record_moves_no_other():
    """The same order, the same public points; in every problem one record differs."""
    generator = np.random.default_rng(0)
    x, y = generator.random((30, 2)), generator.integers(0, 3, 30)
    other_x, other_y = x.copy(), y.copy()
    other_x[7], other_y[7] = [0.9, 0.1], (y[7] + 1) % 3
    pairs = [
        make_problems(data_of(a, b, 3).private, facts_of(data_of(a, b, 3)), LearnOptions(), 1e-5, 0)
        for a, b in ((x, y), (other_x, other_y))
    ]
    assert len(pairs[0]) == 3
    changed = set()
    for left, right in zip(*pairs, strict=True):
        differ = (left.sample.x != right.sample.x).any(1) | (left.sample.y != right.sample.y)
        assert differ.sum() == 1 and np.array_equal(left.public_x, right.public_x)
        assert (
            (left.scaled_sample.x != right.scaled_sample.x).any(1) == (left.sample.x != right.sample.x).any(1)
        ).all()
        changed.add(int(differ.argmax()))
    assert len(changed) == 1
    assert sum(p.options.epsilon for p in pairs[0]) == pytest.approx(1.0)
    assert sum(p.delta for p in pairs[0]) == pytest.approx(1e-5)


def test_a_finite_class_has_cuts_of_every_feature():
    """Features whose public values have the same quantiles are two features all the same."""
    generator = np.random.default_rng(0)
    data = data_of(generator.random((30, 3)), np.arange(30) % 2)
    (part,) = make_problems(data.private, facts_of(data), LearnOptions(cuts=4), 1e-5, 0)
    part.public_x[:, 1] = generator.permutation(part.public_x[:, 0])
    found = part.make_quantile_hypotheses()
    assert {(h.feature, h.is_above) for h in found[2:]} == {(f, a) for f in range(3) for a in (True, False)}
    assert len(found) == 2 + 3 * 4 * 2
    assert len({h.threshold for h in found[2:] if h.feature == 2}) == 4


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"private-predictor"}))
@pytest.mark.filterwarnings("ignore::pate_torch.pac.sample.BelowGuaranteeWarning")
def test_a_quote_draws_nothing_and_is_what_is_charged(name):
    from tests.pac.pac_audit import Spy

    side = make_neighbor_problem(
        1024, True, LearnOptions(constants="sharp", points=4, first=2, alpha=0.3, shard=5), 1e-5
    )
    events, spy = plan_events(ALGORITHMS[name], side, "torch"), Spy()
    assert events
    try:
        ALGORITHMS[name].learn(side, spy)
    except ValueError as nothing:
        assert "none of the" in str(nothing)
    assert spy.charged == events and spy.log[0] == "charge" and spy.log.count("charge") == 1


# --- released rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hypotheses,width", [(Thresholds(), 1), (Intervals(), 1), (Stumps(3), 3), (HalfPlanes(), 2)], ids=lambda h: str(h)
)
def test_a_released_rule_says_what_the_hypothesis_says(hypotheses, width):
    """Every dichotomy of points on a coarse grid, where ties and edges are common, and of random ones."""
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.integers(0, 3, (8, width)) / 4, generator.random((6, width))]).astype(np.float32)
    x = x.astype(np.float64)
    data = data_of(x, np.arange(len(x)) % 2)
    for hypothesis in hypotheses.enumerate_representatives(x):
        student = students.make_rule_student(facts_of(data), [hypothesis])
        said = student.compute_probabilities(torch.as_tensor(x, dtype=torch.float32))
        assert (said.argmax(1).numpy() == hypotheses.predict(hypothesis, x)).all(), hypothesis
        assert (said.max(1).values == 1).all()


def test_a_released_linear_model_is_the_one_that_was_drawn():
    generator = np.random.default_rng(0)
    x = generator.random((50, 3))
    data = data_of(x, np.arange(50) % 2)
    (part,) = make_problems(data.private, facts_of(data), LearnOptions(), 1e-5, 0)
    theta = generator.normal(size=4)
    student = students.make_logistic_student(facts_of(data), [theta])
    order = [int(np.flatnonzero((part.sample.x == row).all(1))[0]) for row in data.private.x.double().numpy()]
    logit = student.compute_logits(data.private.x)
    assert torch.allclose(
        logit[:, 1] - logit[:, 0], torch.tensor(part.scaled_sample.x[order] @ theta).float(), atol=1e-5
    )
    many = students.make_logistic_student(facts_of(data_of(x, np.arange(50) % 3, 3)), [theta, -theta, 0 * theta])
    assert many.compute_logits(data.private.x).shape == (50, 3)


# --- audit ----------------------------------------------------------------------------------------------------------


def test_an_audit_keeps_a_sound_claim_and_refutes_six_times_the_rate(monkeypatch, capsys):
    choices = LearnOptions(hypotheses="thresholds", epsilon=1.0)
    sound = audit("sspp", choices, runs=1500, delta=1e-5)
    assert sound.is_sound and 0.1 < sound.proven <= sound.claimed <= 1.0
    right = exponential.draw_gumbel_max
    monkeypatch.setattr(exponential, "draw_gumbel_max", lambda u, rate, noise: right(u, 6 * rate, noise))
    assert not audit("sspp", choices, runs=500, delta=1e-5).is_sound
    assert main(["sspp", "--audit", "500", "--hypotheses", "thresholds"]) == 1
    assert "THE CLAIM IS REFUTED" in capsys.readouterr().out
    assert main(["sspp", "people.csv", "--audit", "500"]) == 2
    assert main(["private-predictor", "--audit", "500", "--hypotheses", "thresholds"]) == 2


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_the_bounds_are_the_theorems(capsys):
    assert main(["bounds", "--dimension", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["records"]["sspp"]["records"] == semi_private.compute_sspp_private_size(
        3, epsilon=1.0, alpha=0.1, beta=0.1
    )
    lower = found["records"]["(lower bound, DF20 Theorem 4)"]["records"]
    assert lower < found["records"]["stable"]["records"] < found["records"]["averaging"]["records"]
    assert main(["bounds"]) == 0 and "lower bound, DF20 Theorem 4" in capsys.readouterr().out


def test_the_page_lists_every_algorithm():
    listed = {row[0].strip("`") for row in table_of(ROOT / "docs" / "learn.md", "algorithms")[1:]}
    assert listed == set(ALGORITHMS)
