"""``pate runs`` lists finished runs, and claims nothing for a run without privacy."""

import json

from pate_torch.cli.main import main


def write(root, name, **changes):
    folder = root / "runs" / "digits" / "gaussian" / name / "release"
    folder.mkdir(parents=True)
    content = {"dataset": "digits", "mechanism": "gaussian", "student": "fixmatch", "epsilon": 1.2341}
    content |= {"epsilon_charged": 2.0, "delta": 1e-5, "student_accuracy": 0.9512, "private": True, "release_id": "0f"}
    (folder / "summary.json").write_text(json.dumps(content | changes))


def test_runs_are_listed(tmp_path, capsys):
    write(tmp_path, "first")
    write(tmp_path, "seeded", private=False, epsilon=None, epsilon_charged=None)
    write(tmp_path, "labels", student=None, student_accuracy=None, dataset="clinics")
    (tmp_path / "runs" / "digits" / "gaussian" / "torn" / "release").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "gaussian" / "torn" / "release" / "summary.json").write_text("{")
    assert main(["runs", "--home", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert {"run", "first", "seeded", "labels"} == set(lines)
    assert "1.235" in lines["first"] and "95.1%" in lines["first"]  # an epsilon is rounded up
    assert "NOT PRIVATE" in lines["seeded"] and "1.23" not in lines["seeded"]
    assert main(["runs", "--home", str(tmp_path), "--json", "--dataset", "clinics"]) == 0
    [only] = json.loads(capsys.readouterr().out)
    assert only["epsilon"] == 1.2341 and only["run"] == "digits/gaussian/labels"
