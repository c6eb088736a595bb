"""``pate verify`` on releases of synthetic tables: honest ones pass, and every lie about them is found."""

import functools
import hashlib
import json
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from pate_torch import TabularSynthesizer
from pate_torch.cli.main import main as pate
from pate_verify.command import verify_release
from pate_verify.release import ReleaseFolder, list_required_events

COLUMNS = {
    "=age": {"type": "integer", "low": 0, "high": 100, "bins": 3},
    "ward": {"type": "category", "values": ["a", "two\nlines"]},
    "ill": {"type": "boolean"},
}
FORMS = {
    "plain": {},
    "rounds": {"rounds": 2},
    "replaced": {"adjacency": "replace_one", "rounds": 1},
    "discrete": {"noise": "discrete", "rounds": 1, "adjacency": "replace_one"},
    "without a target": {"target": None},
}


def fit(home, account="clinic", **options):
    draw = np.random.default_rng(0)
    table = {
        "=age": draw.integers(0, 101, 600),
        "ward": draw.choice(["a", "two\nlines"], 600),
        "ill": draw.random(600) < 0.4,
    }
    settings = {"account": account, "target": "ill", "schema": {"columns": COLUMNS}, "home": home, "verbose": False}
    return TabularSynthesizer(2.0, **(settings | options)).fit(table).release_


@pytest.fixture(scope="module")
def fit_once(tmp_path_factory):
    return functools.cache(lambda form: fit(tmp_path_factory.mktemp("home"), **FORMS[form]))


@pytest.fixture(params=["rounds"])
def release(request, fit_once, tmp_path):
    folder = fit_once(request.param)
    return shutil.copytree(folder.parents[4], tmp_path / "home") / folder.relative_to(folder.parents[4])


in_every_form = pytest.mark.parametrize("release", FORMS, indirect=True)


def run_checks(release, ledger=True):
    place = release.parents[4] / "ledger.sqlite" if ledger else None
    return {check.name: str(check).split()[0] for check in reversed([*verify_release(release, place)])}


def find_faults(release, ledger=True):
    return {name for name, mark in run_checks(release, ledger).items() if mark == "FAILS"}


def write_hashes(release):
    """Write the hashes of all files as they are."""
    lines = (release / "SHA256SUMS").read_text().splitlines()
    names = [line.split("  ", 1)[1] for line in lines]
    hashes = [f"{hashlib.sha256((release / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (release / "SHA256SUMS").write_text("".join(hashes))


def change_json(file, change):
    facts = json.loads(file.read_text())
    change(facts)
    file.write_text(json.dumps(facts))


def change_header(release, change):
    file = release / "synthesizer.safetensors"
    with safe_open(file, framework="pt") as held:
        facts, tensors = json.loads(held.metadata()["pate_torch"]), {k: held.get_tensor(k) for k in held.keys()}  # noqa: SIM118 (not a dict)
    change(facts)
    save_file(tensors, file, metadata={"pate_torch": json.dumps(facts)})


@in_every_form
def test_an_honest_table_passes(release):
    assert set(run_checks(release).values()) == {"ok"}
    assert {"mechanism", "table", "files", "charges", "cap"} <= set(run_checks(release))


@in_every_form
def test_another_parameter_is_found_although_all_hashes_fit(release):
    original = json.loads((release / "privacy.json").read_text())
    parameters = original["mechanism"]["parameters"]
    keys = {"sigma", "count_sigma", "vote_sigma", "num_tables", "order", "rounds"}
    assert len(keys & parameters.keys()) >= 5  # without rounds there is no noise of votes
    for key in keys & parameters.keys():
        factor = 2 if key in ("num_tables", "order") else 0.99
        value = parameters[key] + 1 if key == "rounds" else parameters[key] * factor
        mechanism = original["mechanism"] | {"parameters": parameters | {key: value}}
        (release / "privacy.json").write_text(json.dumps(original | {"mechanism": mechanism}))
        write_hashes(release)
        assert find_faults(release, ledger=False) & {"mechanism", "table"}, key


def test_more_tables_with_more_noise_are_found_by_the_file(release):
    def change(facts):
        parameters = facts["mechanism"]["parameters"]
        parameters |= {"num_tables": 4 * parameters["num_tables"], "sigma": 2 * parameters["sigma"]}

    change_json(release / "privacy.json", change)
    write_hashes(release)
    assert find_faults(release, ledger=False) == {"table"}


@in_every_form
def test_less_noise_than_the_statement_says_is_found_in_every_event(release):
    """No event may be left out or have a smaller cost."""
    folder = ReleaseFolder.load(release)
    (part,) = folder.parts
    required = list_required_events(folder)
    assert len(part["events"]) == len(required) == (3 if "vote_sigma" in str(folder.statement) else 2)
    for place, event in enumerate(part["events"]):
        (scale,) = event.keys() - {"kind", "count"}
        for change in ({"count": 0}, {scale: 0.99 * event[scale]}):

            def edit(facts, place=place, change=change):
                facts["composition"]["parts"][0]["events"][place] |= change

            original = (release / "privacy.json").read_text()
            change_json(release / "privacy.json", edit)
            write_hashes(release)
            assert "mechanism" in find_faults(release, ledger=False)
            (release / "privacy.json").write_text(original)


TAMPERED = {
    "sigma": lambda facts: facts.update(sigma=2 * facts["sigma"]),
    "size": lambda facts: facts.update(size=facts["size"] + 1),
    "one table twice": lambda facts: facts.update(cliques=[*facts["cliques"][:-1], facts["cliques"][0]]),
    "one table less": lambda facts: facts.update(cliques=facts["cliques"][1:]),
    "a column": lambda facts: facts["domain"]["columns"].update(other={"type": "boolean"}),
}


@pytest.mark.parametrize("lie", TAMPERED)
def test_another_model_is_found_by_its_header_and_by_the_ledger(release, lie):
    change_header(release, TAMPERED[lie])
    assert find_faults(release, ledger=False) >= {"files"}
    write_hashes(release)
    assert find_faults(release, ledger=False) == {"table"}
    assert find_faults(release) == {"table", "charges"}


def test_other_numbers_in_a_model_and_other_first_counts_are_found_by_the_ledger(release):
    file = release / "synthesizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert find_faults(release, ledger=False) == {"files"}
    write_hashes(release)
    assert not find_faults(release, ledger=False) and find_faults(release) == {"charges"}
    change_json(release / "first_answers.json", lambda facts: facts["counts"].__setitem__(0, 7.0))
    write_hashes(release)
    assert find_faults(release) == {"charges"}


def test_other_rows_are_found_by_the_ledger(release):
    """Private rows in place of the synthetic ones."""
    head, *rows = (release / "synthetic.csv").read_text().splitlines(keepends=True)
    (release / "synthetic.csv").write_text(head + "".join(rows[:2] + rows[:1] + rows[3:]))
    write_hashes(release)
    assert not find_faults(release, ledger=False) and find_faults(release) == {"charges"}


@pytest.mark.parametrize("name", ["synthesizer.safetensors", "synthetic.csv", "first_answers.json"])
def test_a_file_that_is_missing_or_empty_is_found(release, name):
    (release / name).write_bytes(b"")
    write_hashes(release)
    assert "table" in find_faults(release, ledger=False)
    (release / name).unlink()
    assert find_faults(release, ledger=False) >= {"files", "table"}


def test_a_student_is_no_part_of_a_table(release):
    (release / "student.safetensors").write_bytes((release / "synthesizer.safetensors").read_bytes())
    with (release / "SHA256SUMS").open("a") as sums:
        sums.write(f"{'0' * 64}  student.safetensors\n")
    write_hashes(release)
    assert "files" in find_faults(release, ledger=False)


def test_rows_that_are_missing_are_found(release):
    rows = (release / "synthetic.csv").read_text().splitlines(keepends=True)
    (release / "synthetic.csv").write_text("".join(rows[:-1]))
    write_hashes(release)
    assert find_faults(release, ledger=False) == {"table"}


def test_the_files_of_a_table_are_no_part_of_another_release(release):
    change_json(release / "privacy.json", lambda facts: facts["mechanism"].update(name="gaussian"))
    write_hashes(release)
    assert "files" in find_faults(release, ledger=False)


def test_the_ledger_of_another_account_fails_the_checks(tmp_path, capsys):
    release = fit(tmp_path / "one")
    fit(tmp_path / "two", account="other")
    assert pate(["verify", str(release), "--ledger", str(tmp_path / "two" / "ledger.sqlite")]) == 1
    output = capsys.readouterr().out
    assert "this ledger has no account 'clinic'" in output and "FAILS  chain" in output
