"""Texts of one's own, and vectors joined by id: read strictly, each record by itself; what fails is one clear line."""

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from pate_torch.core import texts
from pate_torch.data.embeddings import Embeddings, read_vectors
from pate_torch.data.text import Text

COUNT, WIDTH = 90, 5


def written(folder, name="mails.csv", **more):
    rows = pd.DataFrame(
        {
            "body": [f"text {i} is, {'short' if i % 3 else 'long ' * 30}" for i in range(COUNT)],
            "kind": [("spam", "ham")[i % 2] for i in range(COUNT)],
            "user": [f"u{i // 3}" for i in range(COUNT)],
            "key": [f"k{i}" for i in range(COUNT)],
        }
        | more
    )
    (rows.to_parquet if name.endswith(".parquet") else rows.to_csv)(folder / name, index=False)
    return rows, str(folder / name)


def text(path, **more):
    given = {"name": "mails", "path": path, "column": "body", "label": "kind", "publish_split": True}
    return Text(**(given | {"fractions": (0.6, 0.2, 0.2)} | more))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_texts_come_with_their_labels_and_units(tmp_path, suffix):
    rows, path = written(tmp_path, f"mails.{suffix}")
    data = text(path, group="user", max_bytes=64).load()
    assert data.spec.kind == "text" and data.spec.text == "body" and data.spec.class_names == ("ham", "spam")
    assert data.private.unit == "group:user" and data.spec.input_shape == (64,) and data.private.x.dtype == torch.uint8
    whole = {body[:64]: kind for body, kind in zip(rows["body"], rows["kind"], strict=True)}
    for x, y in zip(texts.decode_texts(data.private.x), data.private.y.tolist(), strict=True):
        assert whole[x] == data.spec.class_names[y]
    parts = [set(texts.decode_texts(x)) for x in (data.private.x, data.pool.x, data.evaluation.x)]
    assert sum(map(len, parts)) == COUNT and not parts[0] & parts[1] and not parts[1] & parts[2]
    assert data.adjacencies == ("add_remove",) and data.pool.names.kind == "content"


def test_files_without_a_header_and_with_marks_of_their_own(tmp_path):
    (tmp_path / "a.tsv").write_text("".join(f'"Odd" number {i}, she said "\tc{i % 2}\n' for i in range(80)))
    given = {"separator": "\\t", "columns": ["text", "label"], "column": "text", "label": "label"}
    data = text(str(tmp_path / "a.tsv"), quotes=False, **given).load()
    assert all(said.startswith('"Odd" number') for said in texts.decode_texts(data.private.x))
    with pytest.raises(ValueError, match=r"dataset\.path=.*a quote is left open"):
        text(str(tmp_path / "a.tsv"), **given).load()
    with pytest.raises(ValueError, match=r"its rows have 2 fields, and 3 columns are named"):
        text(str(tmp_path / "a.tsv"), quotes=False, **(given | {"columns": ["text", "label", "more"]})).load()


@pytest.mark.parametrize(
    "change, why",
    [
        ({"column": "subject"}, r"dataset\.column='subject': must be one of body, key, kind, user"),
        ({"label": "class"}, r"dataset\.label='class': must be one of"),
        ({"group": "person"}, r"dataset\.group='person': must be one of"),
        ({"publish_split": False}, r"dataset\.publish_split=False.*dataset\.public_path"),
        ({"max_bytes": 3}, r"dataset\.max_bytes=3"),
        ({"empty": "keep"}, r"dataset\.empty='keep': must be one of drop, error"),
        ({"separator": "::"}, r"dataset\.separator='::': must be one character"),
        ({"classes": ["spam"]}, r"dataset\.classes=\['spam'\]: must list at least two"),
    ],
)
def test_what_cannot_be_read_is_one_clear_line(tmp_path, change, why):
    _, path = written(tmp_path)
    with pytest.raises(ValueError, match=why) as caught:
        text(path, **change).load()
    assert "\n" not in str(caught.value)


def test_empty_texts_and_other_encodings_are_named(tmp_path):
    rows, path = written(tmp_path)
    rows.loc[::2, "body"] = ""
    rows.to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"dataset\.empty='error': stops at \d+ public records without a text"):
        text(path).load()
    rows["body"] = "Grüße"
    rows.to_csv(path, index=False, encoding="latin-1")
    with pytest.raises(ValueError, match=r"mails\.csv': is not .*\(it is not UTF-8: byte 0xfc\)\. Convert it: iconv"):
        text(path).load()


# ---- vectors ---------------------------------------------------------------------------------------------------------


def stored(folder, kind, ids, x):
    """The vectors in a shuffled order, in a file of that kind; what Embeddings is given."""
    order = np.random.default_rng(0).permutation(len(ids))
    ids, x = [ids[i] for i in order], x[order]
    file = folder / f"vectors.{kind.split()[0]}"
    if kind == "npy":
        np.save(file, x)
        (folder / "ids.txt").write_text("\n".join(ids) + "\n")
        return {"vectors": str(file), "ids": str(folder / "ids.txt")}
    if kind == "safetensors":
        save_file({"embeddings": torch.from_numpy(x).clone(), "id": torch.tensor([int(i) for i in ids])}, file)
    elif kind == "parquet of lists":
        pd.DataFrame({"key": ids, "embedding": list(x)}).to_parquet(file)
    else:
        pd.DataFrame({"key": ids, **{f"v{d}": x[:, d] for d in range(x.shape[1])}}).to_parquet(file)
    return {"vectors": str(file)}


def embeddings(folder, given, **more):
    path = folder / "table.csv"
    table = {"key": [str(i) for i in range(COUNT)], "kind": [("spam", "ham")[i % 2] for i in range(COUNT)]}
    if not path.exists():
        pd.DataFrame(table).to_csv(path, index=False)
    known = {"name": "mails", "path": str(path), "id": "key", "label": "kind", "publish_split": True}
    return Embeddings(**(known | {"fractions": (0.6, 0.2, 0.2)} | given | more))


@pytest.mark.parametrize("kind", ["npy", "safetensors", "parquet of lists", "parquet of columns"])
def test_vectors_are_joined_by_id_whatever_their_order(tmp_path, kind):
    x = np.random.default_rng(1).normal(size=(COUNT, WIDTH)).astype(np.float32)
    given = stored(tmp_path, kind, [str(i) for i in range(COUNT)], x)
    data = embeddings(tmp_path, given, encoder={"name": "ours", "license": "MIT"}).load()
    assert data.spec.input_shape == (WIDTH,) and data.spec.encoder.name == "ours" and data.spec.encoder.kind == "given"
    for unit, row, y in zip(data.private.unit_id, data.private.x.numpy(), data.private.y.tolist(), strict=True):
        assert np.array_equal(row, x[int(unit)]) and data.spec.class_names[y] == ("spam", "ham")[int(unit) % 2]
    z = data.spec.normalize(data.pool.x)
    assert torch.allclose(z.mean(0), torch.zeros(WIDTH), atol=1e-5) and float(z.square().mean()) == pytest.approx(1)


def test_vectors_that_do_not_fit_are_one_clear_line(tmp_path):
    ids = [str(i) for i in range(COUNT)]
    x = np.zeros((COUNT, WIDTH), np.float32)
    np.save(tmp_path / "v.npy", x)
    (tmp_path / "ids.txt").write_text("\n".join(ids))
    (tmp_path / "few.txt").write_text("1\n2\n")
    (tmp_path / "twice.txt").write_text("\n".join(["0", *ids[:-1]]))
    (tmp_path / "v.txt").write_text("1 2 3")
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    np.save(tmp_path / "flat.npy", x[0])
    np.save(tmp_path / "whole.npy", x.astype(int))
    np.save(tmp_path / "nan.npy", np.where(np.arange(WIDTH) == 2, np.nan, x))
    np.save(tmp_path / "less.npy", x[: COUNT // 2])
    (tmp_path / "less.txt").write_text("\n".join(ids[: COUNT // 2]))
    np.save(tmp_path / "objects.npy", np.array([{}, {}]), allow_pickle=True)
    save_file({"vectors": torch.zeros(2, 2)}, tmp_path / "v.safetensors")
    pd.DataFrame({"key": ["0", "1"], "embedding": [[1.0, 2.0], [1.0]]}).to_parquet(tmp_path / "uneven.parquet")
    pd.DataFrame({"key": ["0"], "name": ["x"]}).to_parquet(tmp_path / "words.parquet")
    for name, ids_file, why in (
        ("v.npy", None, r"holds no ids to join its vectors by\. Give dataset\.ids"),
        ("v.npy", "few.txt", rf"has {COUNT} vectors, and there are 2 ids"),
        ("v.npy", "twice.txt", r"has several vectors of one id"),
        ("less.npy", "less.txt", r"has no finite vector of \d+ public records"),
        ("v.txt", None, r"must be \.npy, \.safetensors or \.parquet"),
        ("missing.npy", None, r"must exist"),
        ("broken.npy", "ids.txt", r"is not readable"),
        ("objects.npy", "ids.txt", r"is not readable \(Object arrays cannot be loaded"),
        ("flat.npy", "ids.txt", r"must hold vectors as numbers \[N, D\], not float32 \(5,\)"),
        ("whole.npy", "ids.txt", r"must hold vectors as numbers"),
        ("nan.npy", "ids.txt", r"has no finite vector of \d+ public records"),
        ("v.safetensors", None, r"no tensor 'embeddings', but vectors"),
        ("uneven.parquet", None, r"its vectors are of several lengths"),
        ("words.parquet", None, r"neither a column 'embedding' nor columns of floating-point"),
    ):
        given = {"vectors": str(tmp_path / name), "ids": None if ids_file is None else str(tmp_path / ids_file)}
        with pytest.raises(ValueError, match=why) as caught:
            embeddings(tmp_path, given).load()
        assert "dataset.vectors=" in str(caught.value) and "\n" not in str(caught.value)
    for change, why in (
        ({"id": None}, r"dataset\.id=None"),
        ({"encoder": {"licence": "MIT"}}, r"dataset\.encoder='licence': must be one of disjoint, license"),
        ({"vectors": None}, r"dataset\.vectors=None"),
    ):
        with pytest.raises(ValueError, match=why):
            embeddings(tmp_path, {}, **change).load()


def test_half_precision_vectors_become_float32(tmp_path):
    save_file({"embeddings": torch.ones(2, 3).half(), "id": torch.tensor([4, 7])}, tmp_path / "v.safetensors")
    ids, x = read_vectors(tmp_path / "v.safetensors", "id", None)
    assert ids == ["4", "7"] and x.dtype == torch.float32 and torch.equal(x, torch.ones(2, 3))
