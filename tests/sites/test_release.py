"""The release folder of several sites: its statement, its proofs, and a model that works without any site."""

import csv
import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn

from pate_torch import load_student
from pate_torch.api.released import ReleasedClassifier
from pate_torch.cli.main import main
from pate_torch.features.contrastive import encode
from pate_torch.release.renderer import escape_markdown
from pate_torch.sites.release import write_model
from pate_torch.sites.training import ask_step
from pate_torch.synthesis.model import TableModel
from tests.release.json_schema import privacy_schema
from tests.sites.site_tables import PUBLIC, make_consortium, make_descent, make_kind, make_rows

DELTA = 1e-5


def compute_epsilon(mu: float) -> float:
    """Epsilon of mu-GDP at DELTA, by root finding (Balle & Wang 2018)."""
    return brentq(lambda e: norm.cdf(-e / mu + mu / 2) - np.exp(e) * norm.cdf(-e / mu - mu / 2) - DELTA, 0, 50)


@pytest.fixture(scope="module", params=["class_sums", "histogram", "marginals"])
def made(request, tmp_path_factory):
    """A kind, and the release of four sites at epsilon 2, its joiner and its statement."""
    home = tmp_path_factory.mktemp(request.param)
    (home / "owner.yaml").write_text("sites:\n  contact: office of the study\n")
    return request.param, *release(home, request.param, epsilons=(1.9,), num_sites=4)


def release(folder, kind, epsilons=(0.5,), num_sites=3, **terms):
    """Ask one round for each epsilon, sum the last one, and write its release."""
    consortium = make_consortium(folder, num_sites=num_sites, **terms)
    for epsilon in epsilons:
        _, round_raw, public_raw = consortium.joiner.ask(make_kind(kind), epsilon)
    consortium.joiner.sum(consortium.answer_all(round_raw, public_raw))
    (out := folder / "release").mkdir()
    write_model(consortium.joiner, consortium.joiner.load_sum(), PUBLIC, out, home=folder)
    return out, consortium.joiner, json.loads((out / "privacy.json").read_text())


def test_the_statement_says_whom_it_trusts_and_what_everybody_else_pays(made):
    kind, folder, joiner, statement = made
    assert not list(Draft202012Validator(privacy_schema()).iter_errors(statement))
    trust, charter = statement["trust"], joiner.charter
    assert trust["model"] == "distributed" and trust["colluding"] == 1 and len(trust["sites"]) == 4
    assert trust["in_words"].startswith("Trust: distributed, t = 1 of 4.")
    assert trust["charter_sha256"] == charter.digest.hex() and trust["fingerprint"] == charter.format_fingerprint()
    assert [site["name"] for site in trust["sites"]] == [f"Site {i}" for i in range(4)]
    assert [bytes.fromhex(site["signing_key"]) for site in trust["sites"]] == [s.signing_key for s in charter.sites]
    mu = brentq(lambda m: compute_epsilon(m) - statement["guarantee"]["epsilon"], 1e-3, 5)
    for u, cost in enumerate(trust["costs"]):
        assert cost["colluding"] == u
        assert cost["epsilon"] == pytest.approx(compute_epsilon(mu * (3 / (4 - u)) ** 0.5), rel=1e-6)
    assert 1.899 < trust["costs"][1]["epsilon"] == statement["guarantee"]["epsilon"] <= 1.9
    card, page = (folder / "README.md").read_text(), (folder / "report.html").read_text()
    for text in (trust["in_words"], *statement["not_covered"], *statement["assumptions"]):
        assert str(escape_markdown(text)) in card
    for text in (trust["fingerprint"], trust["charter_sha256"], *(site["signing_key"] for site in trust["sites"])):
        assert text in card and text in page
    for words in ("X25519 or ML-KEM-768", "declared, not checked; a record at k sites pays k mu"):
        assert any(words in sentence for sentence in statement["assumptions"])
    for words in ("A site as such", "who answered, and when", "correctness of the sum", "duration", "dishonest"):
        assert any(words in sentence for sentence in statement["not_covered"])
    assert "The trust model is central" not in card + page and "ledger has no other" not in card + page
    assert (folder / "release.json").exists() == (kind != "marginals")
    assert statement["owner"]["contact"] == "office of the study" and "What the joiner states" in card


def test_aborted_rounds_are_in_the_total_and_not_in_the_guarantee(tmp_path):
    folder, joiner, statement = release(tmp_path, "histogram", epsilons=(0.3, 0.4, 0.5))
    mus = [brentq(lambda m, e=e: compute_epsilon(m) - e, 1e-3, 5) for e in (0.3, 0.4, 0.5)]
    composition = statement["composition"]
    assert statement["guarantee"]["epsilon"] == pytest.approx(0.5, rel=1e-5)
    assert composition["account_total"] == pytest.approx(compute_epsilon(np.linalg.norm(mus)), rel=1e-5)
    assert composition["account_total"] == joiner.compute_guarantees()[1].epsilon
    assert [other["epsilon"] for other in statement["other_releases"]] == pytest.approx([0.3, 0.4], rel=1e-5)
    assert [facts["used"] for facts in statement["trust"]["rounds"]] == [False, False, True]
    names = {f"round-{slot}.{end}" for slot in range(3) for end in ("json", "public")}
    assert names <= {path.name for path in folder.iterdir()}
    assert "aborted rounds included" in (folder / "README.md").read_text()
    assert not (folder / "sum-0.json").exists() and (folder / "sum-2.json").exists()


def test_units_at_two_sites_pay_twice_mu_and_the_statement_names_their_column(tmp_path):
    _, joiner, statement = release(tmp_path, "class_sums", max_sites_per_unit=2)
    ((current_round, *_),) = joiner.load_rounds()
    mu = 2 * 2**30 / (float(current_round.share) * 2**0.5)
    assert statement["guarantee"]["epsilon"] == pytest.approx(compute_epsilon(mu), rel=1e-6)
    assert any("at 2 of the sites at most" in sentence for sentence in statement["assumptions"])
    assert Fraction(statement["mechanism"]["parameters"]["share"]) == current_round.share
    sigma = float(current_round.share) / 2**30 * 3**0.5  # of the noise of all three shares
    assert statement["mechanism"]["parameters"]["sigma"] == pytest.approx(sigma, rel=1e-12)


def test_a_release_of_several_rounds_pays_for_all_of_them_and_for_no_failed_round(tmp_path):
    consortium = make_consortium(tmp_path)
    kind = make_descent(steps=2)
    for step in range(3):
        _, round_raw, public_raw = ask_step(consortium.joiner, kind, 0.5, again=step == 2)
        # The answers of the second round are lost.
        (consortium.answer_all if step == 1 else consortium.run_round)(round_raw, public_raw)
    (out := tmp_path / "release").mkdir()
    report = write_model(consortium.joiner, consortium.joiner.load_sum(), PUBLIC, out, home=tmp_path)
    mu = brentq(lambda m: compute_epsilon(m) - report.claim.epsilon, 1e-3, 5) / 2**0.5  # of each of two equal rounds
    assert report.claim.epsilon == pytest.approx(0.5, rel=1e-5)
    assert [other.epsilon for other in report.claim.other_releases] == pytest.approx([compute_epsilon(mu)], rel=1e-5)
    assert report.claim.epsilon_charged == pytest.approx(compute_epsilon(mu * 3**0.5), rel=1e-5)
    assert [facts["used"] for facts in report.trust["rounds"]] == [True, False, True]
    assert {path.name for path in out.glob("sum-*")} == {"sum-0.json", "sum-2.json"}
    assert {path.name for path in out.glob("*.public")} == {"round-0.public"}


def test_the_student_works_without_any_site(made, tmp_path):
    kind, folder, joiner, _ = made
    if kind == "marginals":
        pytest.skip("a synthetic table has no student")
    table = {name: column.to_pylist() for name, column in make_rows(400, 98).items()}
    truth = np.array(table.pop("y"))
    predicted = ReleasedClassifier.load(folder).predict(table)
    assert np.mean(np.asarray(predicted) == truth) > 0.75
    assert list(load_student(folder).class_names) == ["a", "b", "c"]
    lines = [",".join(table), *(",".join(cells) for cells in zip(*table.values(), strict=True))]
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n")
    assert main(("predict", str(folder), str(tmp_path / "new.csv"), "--output", str(tmp_path / "out.csv"))) == 0
    output = (tmp_path / "out.csv").read_text().splitlines()
    assert len(output) == 401 and [row.split(",")[1] for row in output[1:]] == [str(name) for name in predicted]
    with (folder / "labels.csv").open() as file:
        queries = [int(row["query"]) for row in csv.DictReader(file)]
    assert len(set(queries)) == len(queries) == (300 if kind == "class_sums" else 20)
    if kind == "histogram":  # the questions are named by their places among the public points
        kind = joiner.load_sum().kind
        points = {name: column for name, column in PUBLIC.items() if name != "y"}
        feature_PD = encode(nn.Flatten(), torch.from_numpy(kind.spec.schema.encode(points)), kind.spec)
        assert torch.equal(feature_PD[queries], kind.query_QD)


def test_a_synthetic_table_can_be_drawn_again(made):
    kind, folder, _, statement = made
    if kind != "marginals":
        pytest.skip("a student has no synthetic table")
    rows = (folder / "synthetic.csv").read_text().splitlines()
    model = TableModel.load(folder / "synthesizer.safetensors")
    assert len(rows) == model.size + 1 and len(model.sample(7)["y"]) == 7
    assert statement["mechanism"]["parameters"]["num_tables"] == 3 and statement["utility"]["student"] is None
    assert f"{model.size:,} synthetic rows with 3 columns" in (folder / "report.html").read_text()
