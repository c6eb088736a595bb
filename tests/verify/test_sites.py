"""``pate verify`` on releases of several sites: honest ones pass, and lies that mend every hash are found."""

import functools
import hashlib
import itertools
import json
import math
import shutil
import sys
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from scipy.optimize import brentq
from scipy.stats import norm

from pate_torch.cli.main import main as pate
from pate_torch.privacy.domain import TableDomain
from pate_torch.sites import charter, training
from pate_torch.sites.keys import load_joiner_key
from pate_torch.sites.release import write_model
from pate_verify import sites as verifier
from pate_verify.command import verify_release
from tests.sites.site_tables import PUBLIC, SCHEMA, make_consortium, make_descent, make_kind
from tests.sites.site_worlds import forge

FORMS = {
    "class_sums": {},
    "histogram": {"adjacency": "replace_one", "records": (200,) * 4},
    "marginals": {"max_sites_per_unit": 2},
}


@pytest.fixture(scope="module")
def make_once(tmp_path_factory):
    """Make a release of four sites with t = 1, whose first round was aborted, and return its home."""

    def make(form):
        home = tmp_path_factory.mktemp(form)
        consortium = make_consortium(home, num_sites=4, **FORMS[form])
        consortium.joiner.ask(make_kind(form), 0.3)
        consortium.run_round(*consortium.joiner.ask(make_kind(form), 0.5)[1:])
        (home / "release").mkdir()
        write_model(consortium.joiner, consortium.joiner.load_sum(), PUBLIC, home / "release", home=home)
        return home

    return functools.cache(make)


@pytest.fixture(params=["histogram"])
def honest(request, make_once):
    return make_once(request.param)


in_every_form = pytest.mark.parametrize("honest", FORMS, indirect=True)


@pytest.fixture
def release(honest, tmp_path):
    return shutil.copytree(honest / "release", tmp_path / "release")


@pytest.fixture
def joiner_key(honest):
    return load_joiner_key(honest / "join" / "joiner.key")


def find_faults(release):
    return {check.name for check in verify_release(release) if not check.is_ok}


def mend_hashes(release):
    names = sorted(path.name for path in release.iterdir() if path.name != "SHA256SUMS")
    hashes = (f"{hashlib.sha256((release / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    (release / "SHA256SUMS").write_text("".join(hashes))


def change_json(release, change, name="privacy.json"):
    facts = json.loads((release / name).read_text())
    change(facts)
    (release / name).write_text(json.dumps(facts))
    mend_hashes(release)


def sign_again(release, name, key, **changes):
    """Change a signed file, and sign it with a key."""
    raw = forge((release / name).read_bytes(), key, **changes)
    (release / name).write_bytes(raw)
    mend_hashes(release)
    return hashlib.sha256(raw).hexdigest()


def compute_epsilon(mu, delta=1e-5):
    return brentq(lambda e: norm.cdf(-e / mu + mu / 2) - math.exp(e) * norm.cdf(-e / mu - mu / 2) - delta, 0, 50)


@in_every_form
def test_an_honest_release_passes(release, capsys):
    checks = [*verify_release(release)]
    assert all(check.is_ok and not check.is_loose for check in checks), "\n".join(map(str, checks))
    assert [check.name for check in checks if not check.is_checked] == ["ledger"]
    names = {check.name for check in checks}
    assert {"sites", "signatures", "t = 0", "t = 3", "guarantee", "account", "round 0", "files", "words"} <= names
    assert pate(["verify", str(release)]) == 0
    assert "4 sites, t = 1, 2 rounds of one charter" in capsys.readouterr().out


@in_every_form
def test_the_cost_is_that_of_the_shares_of_the_honest_sites(release):
    """Formulas of this test alone: lengths by hand, and epsilon by root finding."""
    protocol = verifier.Protocol(release, json.loads((release / "privacy.json").read_text())["trust"]["rounds"])
    kind, share = protocol.rounds[1].content["kind"], float(Fraction(protocol.rounds[1].content["share"]))
    length = {"class_sums": 2.0**30, "histogram": 2**0.5 * 2.0**28, "marginals": 2 * 3**0.5 * 2.0**28}[kind]
    for colluding in range(4):
        expected = compute_epsilon(length / share / (4 - colluding) ** 0.5)
        bounds = protocol.bound_cost([1], colluding, 1e-5)
        assert bounds.low == pytest.approx(expected, rel=1e-8)
    both = math.hypot(*(length / float(Fraction(file.content["share"])) / 3**0.5 for file in protocol.rounds))
    assert protocol.bound_cost([0, 1], 1, 1e-5).low == pytest.approx(compute_epsilon(both), rel=1e-8)


# ---- lies in the statement -------------------------------------------------------------------------------------------


def claim_smaller_t(facts):
    """Claim that no site colludes, with the cost of all shares, everywhere."""
    smaller = facts["trust"]["costs"][0]["epsilon"]
    facts["trust"]["colluding"], facts["guarantee"]["epsilon"] = 0, smaller
    facts["composition"] |= {"this_release": smaller, "this_release_ex_post": smaller}


STATEMENT_LIES = {
    "t": (claim_smaller_t, {"sites", "guarantee"}),
    "a cost": (
        lambda f: f["trust"]["costs"][3].update(epsilon=0.999 * f["trust"]["costs"][3]["epsilon"]),
        {"t = 3"},
    ),
    "the cost of readers": (lambda f: f["trust"]["costs"][0].update(epsilon=0.1), {"t = 0"}),
    "a cost less": (lambda f: f["trust"]["costs"].pop(), {"sites"}),
    "the total": (lambda f: f["composition"].update(account_total=f["guarantee"]["epsilon"]), {"account"}),
    "the aborted round": (lambda f: f["other_releases"].clear(), {"round 0"}),
    "its cost": (lambda f: f["other_releases"][0].update(epsilon=0.2), {"round 0"}),
    "M": (lambda f: f["trust"].update(max_sites_per_unit=3), {"sites"}),
    "a key": (lambda f: f["trust"]["sites"][2].update(signing_key="0" * 64), {"sites"}),
    "a site less": (lambda f: f["trust"]["sites"].pop(), {"sites"}),
    "a name": (lambda f: f["trust"]["sites"][2].update(name="Site 7"), {"sites"}),
    "the charter": (lambda f: f["trust"].update(charter_sha256="0" * 64), {"sites"}),
    "two words": (
        lambda f: f["trust"].update(fingerprint=" ".join(f["trust"]["fingerprint"].split()[::-1])),
        {"sites"},
    ),
    "a round": (lambda f: f["trust"]["rounds"][0].update(sha256="0" * 64), {"sites"}),
    "the first round": (lambda f: f["trust"]["rounds"].pop(0), {"files", "sites"}),
    "the used round": (lambda f: f["trust"]["rounds"][1].update(used=False), {"files", "sites"}),
    "the noise": (lambda f: f["mechanism"]["parameters"].update(sigma=1e3), {"sites"}),
    "the trust model": (lambda f: f.update(trust={"model": "central", "in_words": f["trust"]["in_words"]}), {"files"}),
}


@pytest.mark.parametrize("lie", STATEMENT_LIES)
def test_a_lie_in_the_statement_is_found_although_all_hashes_fit(release, lie):
    change, expected = STATEMENT_LIES[lie]
    change_json(release, change)
    assert find_faults(release) >= expected


@pytest.fixture(scope="module")
def descent(tmp_path_factory):
    """Release of three steps, of which the second was asked twice, because the first answers were lost."""
    home = tmp_path_factory.mktemp("descent")
    consortium, kind = make_consortium(home, num_rows=40, cap=3.0), make_descent()
    joiner = consortium.joiner
    consortium.run_round(*training.ask_step(joiner, kind, 0.5)[1:])
    consortium.answer_all(*training.ask_step(joiner, kind, 0.5)[1:])
    for again in (True, False):
        consortium.run_round(*training.ask_step(joiner, kind, 0.5, again=again)[1:])
    (home / "release").mkdir()
    write_model(joiner, joiner.load_sum(), PUBLIC, home / "release", home=home)
    return home / "release"


def test_a_used_round_that_is_declared_unused_is_found_by_the_sum_that_a_later_round_names(descent, tmp_path):
    assert {check.name for check in verify_release(descent) if not (check.is_ok and check.is_checked)} == {"ledger"}
    for slot in (0, 2):
        release = shutil.copytree(descent, tmp_path / str(slot))
        (release / f"sum-{slot}.json").unlink()
        change_json(release, lambda facts, slot=slot: facts["trust"]["rounds"][slot].update(used=False))
        assert "unused" in find_faults(release)


def test_a_round_of_another_plan_is_not_taken_for_a_used_one(tmp_path):
    consortium, kind = make_consortium(tmp_path, num_rows=40, cap=3.0), make_descent(steps=2)
    joiner = consortium.joiner
    consortium.run_round(*joiner.ask(make_kind("histogram"), 0.5)[1:])
    consortium.run_round(*training.ask_step(joiner, kind, 0.5)[1:])
    consortium.answer_all(*training.ask_step(joiner, kind, 0.5)[1:])  # the answers are lost
    for slot in (2, 3):
        (tmp_path / str(slot)).mkdir()
        if slot == 3:
            consortium.run_round(*training.ask_step(joiner, kind, 0.5, again=True)[1:])
        write_model(joiner, joiner.load_sum(slot if slot == 3 else 1), PUBLIC, tmp_path / str(slot), home=tmp_path)
        assert not find_faults(tmp_path / str(slot))


# ---- lies in the files, signed again by the joiner -------------------------------------------------------------------


def test_another_t_in_a_charter_that_the_joiner_signed_again_is_found(release, joiner_key):
    digest = sign_again(release, "charter.json", joiner_key, colluding=0)
    change_json(release, claim_smaller_t)
    words = " ".join(charter.encode_words(bytes.fromhex(digest)))
    change_json(release, lambda facts: facts["trust"].update(charter_sha256=digest, fingerprint=words))
    faults = [str(check) for check in verify_release(release) if check.name == "sites"]
    assert "charter of round 1" in faults[0] and "charter of sum 1" in faults[0] and "fingerprint" not in faults[0]


def test_a_smaller_share_is_found_by_its_cost_and_by_the_sum(release, joiner_key):
    share = Fraction(json.loads((release / "round-1.json").read_bytes().partition(b"\n")[0])["share"])
    smaller = {"share": str(share / 2), "sigma": str(Fraction(1))}
    digest = sign_again(release, "round-1.json", joiner_key, **smaller)
    change_json(release, lambda facts: facts["trust"]["rounds"][1].update(sha256=digest))
    change_json(release, lambda facts: facts["mechanism"]["parameters"].update(share=str(share / 2)))
    assert find_faults(release) >= {"sites", "guarantee", "account", "t = 0", "t = 3"}
    assert "signatures" not in find_faults(release)


def test_a_share_below_the_noise_of_the_round_is_found(release, joiner_key):
    content = json.loads((release / "round-0.json").read_bytes().partition(b"\n")[0])
    digest = sign_again(release, "round-0.json", joiner_key, sigma=str(2 * Fraction(content["sigma"])))
    change_json(release, lambda facts: facts["trust"]["rounds"][0].update(sha256=digest))
    (check,) = (check for check in verify_release(release) if check.name == "sites")
    assert check.message == "do not fit: share of round 0"


@pytest.mark.parametrize(("name", "change"), [("round-1.public", {"label": "other"}), ("sum-1.json", {"round": None})])
def test_another_public_file_and_a_sum_of_another_round_are_found_by_hashes(release, joiner_key, name, change):
    digest = hashlib.sha256((release / "round-0.json").read_bytes()).hexdigest()
    sign_again(release, name, joiner_key, **{key: value or digest for key, value in change.items()})
    (check,) = (check for check in verify_release(release) if check.name == "sites")
    assert check.message == f"do not fit: {name}"


@pytest.mark.parametrize("name", ["charter.json", "round-0.json", "round-1.public", "sum-1.json"])
def test_a_file_that_is_altered_missing_or_signed_by_another_is_found(release, name):
    raw = (release / name).read_bytes()
    (release / name).write_bytes(raw[:-2] + (b"0" if raw[-2:-1] != b"0" else b"1") + b"\n")
    assert "files" in find_faults(release)
    mend_hashes(release)
    assert "signatures" in find_faults(release)
    (release / name).write_bytes(raw)
    sign_again(release, name, Ed25519PrivateKey.generate())
    assert "signatures" in find_faults(release)
    (release / name).write_bytes(raw[:-300])
    mend_hashes(release)
    assert "sites" in find_faults(release)
    (release / name).unlink()
    mend_hashes(release)
    assert "sites" in find_faults(release)


def test_without_cryptography_signatures_are_not_checked(release, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    checks = {check.name: check for check in verify_release(release)}
    assert not checks["signatures"].is_checked and str(checks["signatures"]).startswith("not checked")
    assert all(check.is_ok for check in checks.values())


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_tables_are_counted_as_they_are_listed():
    for target, order in itertools.product(({"target": "y"}, {}), (1, 2)):
        kind = training.make_marginal_counts(TableDomain.from_dict({"columns": SCHEMA["columns"], **target}), order)
        assert verifier.count_tables(kind.to_content()[0]) == len(kind.cliques)


def test_words_are_those_of_the_package():
    for seed in range(5):
        digest = np.random.default_rng(seed).bytes(32)
        assert verifier.encode_words(digest) == charter.encode_words(digest)
    assert verifier.encode_words(bytes(32))[-1] == "art"  # BIP 39
