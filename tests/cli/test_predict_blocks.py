"""Predictions in blocks are those of the whole file, and an interrupted call goes on where it stopped."""

import csv
import gzip
import io
import os
import pickle
import signal
import subprocess
import sys
import time
from argparse import Namespace
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from pate_torch import load_student, networks
from pate_torch.cli import predict
from pate_torch.cli.main import main as pate
from pate_torch.core.files import escape_spreadsheet_cell
from pate_torch.data import table_files
from pate_torch.privacy.records import DataSpec
from pate_torch.privacy.schema import TableSchema
from pate_torch.students import store
from pate_torch.students.base import Student
from tests import ROOT

BLOCK_ROWS, NUM_ROWS = 1024, 2500


def make_frame(count=NUM_ROWS, seed=0):
    draw = np.random.default_rng(seed)
    names = [f"=patient, {row}" for row in range(count)]
    frame = pd.DataFrame({"name": names, "town": draw.choice(["a", "b"], count), "day": draw.normal(size=count)})
    return frame.assign(height=draw.normal(170, 9, count).astype(np.float32), visit=pd.Timestamp("2024-02-03"))


def save_student(folder, schema=None, shape=(4,)):
    kind = "logistic" if len(shape) == 1 else "lean_cnn"
    network = networks.describe(kind, shape, 3)
    module = networks.rebuild(network)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) / 9
    constants = ((0.1,) * shape[0], (0.7,) * shape[0])
    classes = ("+low", "mid", "high")
    spec = DataSpec(name="people", num_classes=3, input_shape=shape, class_names=classes, mean=constants[0],
                    std=constants[1], schema=schema)  # fmt: skip
    store.save(Student(network, module.eval(), spec), folder / "student.safetensors")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Folder of a student of a table, whose blocks have 1024 rows."""
    schema = TableSchema.from_public(make_frame(60).drop(columns=["name", "visit"]))
    save_student(tmp_path, schema)
    monkeypatch.setattr(table_files, "count_block_rows", lambda _: BLOCK_ROWS)
    return tmp_path


def make_options(folder, file, **changes):
    defaults = {"id": None, "unknown": "error", "separator": ",", "columns": None, "quotes": True}
    return Namespace(**{"run": folder, "records": file, "weights": None, "tokenizer": None} | defaults | changes)


def predict_whole(options):
    """The predictions of a file that is read, encoded and predicted as one table."""
    student = load_student(options.run)
    columns = options.columns and options.columns.split(",")
    table = table_files.read_table(
        "records", options.records, options.separator, columns=columns, quotes=options.quotes
    )
    x = student.encode(table, unknown=options.unknown)
    names = table[options.id].to_pylist() if options.id is not None else range(len(x))
    return names, student.predict_proba(x), student.class_names


def format_whole(options):
    names, probability_NC, class_names = predict_whole(options)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", "label", *(f"probability_{name}" for name in class_names)])
    for name, probability_C in zip(names, probability_NC, strict=True):
        cells = (str(name), class_names[int(probability_C.argmax())])
        writer.writerow([*map(escape_spreadsheet_cell, cells), *(f"{value:.6g}" for value in probability_C.tolist())])
    return text.getvalue()


def write_file(folder, form):
    frame = make_frame()
    if form == "blank lines":
        lines = frame.to_csv(index=False).splitlines(keepends=True)
        for row in (2400, 1025, 1024, 1023, 3, 0):
            lines.insert(row, "\n\n")
        (folder / "new.csv").write_text("".join(lines) + "\n\n")
    elif form == "packed":
        (folder / "new.csv.gz").write_bytes(gzip.compress(frame.to_csv(index=False).encode()))
        return folder / "new.csv.gz", {}
    elif form == "no header":
        frame.to_csv(folder / "new.csv", index=False, header=False, sep=";")
        return folder / "new.csv", {"columns": ",".join(frame), "separator": ";"}
    elif form == "parquet":
        frame["town"] = frame["town"].astype("category")
        frame.iloc[::-1].to_parquet(folder / "new.parquet", row_group_size=700)
        return folder / "new.parquet", {}
    else:
        frame.to_csv(folder / "new.csv", index=False)
    return folder / "new.csv", {}


@pytest.mark.parametrize(
    ("form", "id_column"),
    [("plain", None), ("blank lines", "name"), ("packed", None), ("no header", "name"), ("parquet", "name")],
)
def test_blocks_are_predicted_as_the_whole_file(form, id_column, folder, capsys):
    file, changes = write_file(folder, form)
    options = make_options(folder, file, id=id_column, **changes)
    with ThreadPoolExecutor(2) as executor:
        for suffix in (".csv", ".parquet"):
            predict.predict_file(options, folder / f"out{suffix}", executor)
    assert (folder / "out.csv").read_text() == format_whole(options)
    names, probability_NC, class_names = predict_whole(options)
    table = pq.read_table(folder / "out.parquet")
    assert table.column("id").to_pylist() == list(names)
    assert table.column("label").to_pylist() == [class_names[label] for label in probability_NC.argmax(1)]
    columns = [table.column(f"probability_{name}").to_numpy() for name in class_names]
    assert np.array_equal(np.stack(columns, 1), probability_NC.numpy())
    assert not any(path.is_dir() for path in folder.iterdir())
    line = "Ignored columns: visit.\n" if id_column else "Ignored columns: name, visit.\n"
    assert capsys.readouterr().err == line * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines.__setitem__(2001, "Ann,x,1,170,2024\n"), "town='x' (row 2000)"),
        (lambda lines: lines.__setitem__(2001, "Ann,a,1,tall,2024\n"), "height='tall' (row 2000)"),
        (lambda lines: lines.__setitem__(2001, "Ann,a,1,170\n"), "line 2002 has 4 fields, and the header 5"),
        (lambda lines: lines.__setitem__(2001, '"Ann,a,1,170,2024\n'), "line 2002: a quote is left open"),
        (lambda lines: lines.__setitem__(0, "name,town,town,height,visit\n"), "names column 'town' more than once"),
        (lambda lines: lines.__delitem__(slice(1, None)), "has no rows"),
    ],
)
def test_errors_name_the_row_or_the_line_of_the_file(change, message, folder, capsys):
    lines = make_frame().to_csv(index=False).splitlines(keepends=True)
    change(lines)
    (folder / "new.csv").write_text("".join(lines))
    assert pate(["predict", str(folder), str(folder / "new.csv"), "--output", str(folder / "out.csv")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (folder / "out.csv").exists()
    assert pate(["predict", str(folder), str(folder / "new.csv")]) == 2
    assert capsys.readouterr() == ("", error)


KILLED_CALL = """
import os, signal, sys
from pate_torch.cli import predict
from pate_torch.cli.main import main as pate
from pate_torch.data import table_files

table_files.count_block_rows = lambda _: 1024
predict_block, count = predict.predict_block, 0

def predict_until_killed(*arguments):
    global count
    if count == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    predict_block(*arguments)

predict.predict_block = predict_until_killed
pate(["predict", *sys.argv[2:]])
"""


def test_a_killed_call_goes_on_with_the_missing_blocks(folder, monkeypatch, capsys):
    file, output = folder / "new.csv", folder / "out.csv"
    frame = make_frame(5000)
    frame.to_csv(file, index=False)
    words = [str(folder), str(file), "--output", str(output)]
    command = [sys.executable, "-c", KILLED_CALL, "3", *words]
    killed = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    parts = folder / ".out.csv.parts"
    assert killed.returncode == -signal.SIGKILL and len(list(parts.iterdir())) == 3 and not output.exists()
    (parts / ".temporary").write_text("half")  # as a kill during a write leaves it
    frame.loc[1500, "height"] += 9.0  # in the second block, which is predicted again
    frame.to_csv(file, index=False)
    predict_block, first_rows = predict.predict_block, []

    def count_blocks(student, payload, part):
        first_rows.append(pickle.loads(payload)[2])
        predict_block(student, payload, part)

    monkeypatch.setattr(predict, "predict_block", count_blocks)
    assert pate(["predict", *words]) == 0
    assert first_rows == [1024, 3072, 4096] and not parts.exists()
    assert output.read_text() == format_whole(make_options(folder, file))
    assert pate(["predict", *words, "--id", "name"]) == 0  # nothing of the finished call is used
    assert first_rows[3:] == [0, 1024, 2048, 3072, 4096]
    capsys.readouterr()


class LazyExecutor(Executor):
    """An executor that runs a call when its result is asked for, and counts the calls that wait."""

    def __init__(self):
        self.num_waiting = self.most_waiting = 0

    def submit(self, fn, /, *args):
        class LazyFuture(Future):
            def result(future, timeout=None):
                self.num_waiting -= 1
                fn(*args)

        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        return LazyFuture()


def test_few_blocks_are_in_memory(folder, capsys):
    make_frame(12 * BLOCK_ROWS).to_csv(folder / "new.csv", index=False)
    options, executor = make_options(folder, folder / "new.csv"), LazyExecutor()
    predict.predict_file(options, folder / "out.csv", executor, max_waiting=3)
    assert executor.most_waiting == 4 and executor.num_waiting == 0
    assert (folder / "out.csv").read_text() == format_whole(options)
    assert capsys.readouterr().err.startswith("Progress: 8192 records\n")


@pytest.mark.parametrize("shape", [(4,), (1, 8, 8)])
def test_arrays_are_read_in_blocks(shape, tmp_path, monkeypatch, capsys):
    save_student(tmp_path, shape=shape)
    monkeypatch.setattr(table_files, "count_block_rows", lambda _: BLOCK_ROWS)
    draw = np.random.default_rng(3)
    points = draw.normal(size=(NUM_ROWS, 4)) if len(shape) == 1 else draw.integers(0, 256, (NUM_ROWS, *shape), np.uint8)
    file = tmp_path / "new.npy"
    np.save(file, np.asfortranarray(points))
    assert pate(["predict", str(tmp_path), str(file), "--output", str(tmp_path / "out.parquet")]) == 0
    table = pd.read_parquet(tmp_path / "out.parquet")
    probability_NC = load_student(tmp_path).predict_proba(points.astype(np.float32) if len(shape) == 1 else points)
    assert np.array_equal(table.iloc[:, 2:].to_numpy(), probability_NC.numpy())
    assert table["id"].tolist() == list(range(NUM_ROWS))
    fractions = points / 255
    fractions[2000] = np.inf
    contents = {"row 2000": fractions, "shape": points[..., :2], "not a readable .npy": None}
    for message, content in contents.items():
        file.write_bytes(b"no array") if content is None else np.save(file, content)
        assert pate(["predict", str(tmp_path), str(file)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_the_output_is_csv_or_parquet(folder, capsys):
    make_frame(3).to_csv(folder / "new.csv", index=False)
    assert pate(["predict", str(folder), str(folder / "new.csv"), "--output", str(folder / "out.xlsx")]) == 2
    assert "output='.xlsx'" in capsys.readouterr().err


@pytest.mark.slow(reason="two processes import torch")
def test_processes_predict_the_same(folder, capsys):
    make_frame(3 * 16_384 + 5).to_csv(folder / "new.csv", index=False)
    words = [str(folder), str(folder / "new.csv"), "--output"]
    assert pate(["predict", *words, str(folder / "one.csv")]) == 0
    assert pate(["predict", *words, str(folder / "two.csv"), "--workers", "2"]) == 0
    assert (folder / "one.csv").read_bytes() == (folder / "two.csv").read_bytes()
    capsys.readouterr()


@pytest.mark.slow(reason="two processes import torch")
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_workers_end_with_a_killed_call(folder):
    make_frame(40 * 16_384).to_csv(folder / "new.csv", index=False)
    words = ["predict", folder, folder / "new.csv", "--output", folder / "out.csv", "--workers", "2"]
    call = subprocess.Popen([sys.executable, "-m", "pate_torch", *map(str, words)], cwd=ROOT, stderr=subprocess.DEVNULL)
    parts, deadline = folder / ".out.csv.parts", time.monotonic() + 120
    while not (parts.exists() and any(parts.iterdir())):
        assert time.monotonic() < deadline and call.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{call.pid}/task/{call.pid}/children").read_text().split()
    workers = [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    call.kill()
    call.wait()
    assert len(workers) == 2 and not (folder / "out.csv").exists()
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker outlives the call"
        time.sleep(0.05)
