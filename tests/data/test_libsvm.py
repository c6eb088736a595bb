"""LIBSVM files: their rows, groups by qid, and features that only private rows have, which are left out."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from pate_torch.data.libsvm import make_hashing_matrix
from tests.data.owner_files import Libsvm, index_by_unit, sparse, write_svm


@pytest.mark.parametrize("is_packed", [False, True])
def test_roles_by_position_cover_the_file_once(is_packed, tmp_path):
    x, y = sparse()
    path = write_svm(tmp_path, x, y)
    if is_packed:
        (tmp_path / "t.svm.gz").write_bytes(gzip.compress(Path(path).read_bytes()))
        path += ".gz"
    data = Libsvm(path=path, roles="position", num_features=30, benchmark=True, nominal_size=160).load()
    assert (len(data.private), len(data.pool), len(data.evaluation.y)) == (160, 20, 20)
    position = data.private.unit_id.astype(int)
    np.testing.assert_allclose(data.private.x.numpy(), x[position].astype(np.float32))
    assert data.private.x.dtype == torch.float32
    assert [(-1, 1)[code] for code in data.private.y] == y[position].tolist()
    assert data.spec.class_names == ("-1", "1") and data.spec.benchmark and data.spec.nominal_size == 160
    label_by_row = {row.tobytes(): label for row, label in zip(x.astype(np.float32) + 0.0, y, strict=True)}  # no -0
    pool_y = [label_by_row[row.numpy().tobytes()] for row in data.pool.x]
    assert [(-1, 1)[code] for code in data.evaluation.pool_y] == pool_y  # still in step after the shuffle
    other = Libsvm(path=path, roles="position", num_features=30, seed=1).load()
    assert set(other.private.unit_id) != set(data.private.unit_id)


def test_qid_is_a_group(tmp_path):
    x, y = sparse()
    path = write_svm(tmp_path, x, y, query_id=np.arange(200) % 25)
    data = Libsvm(path=path, group="qid", fractions=(0.5, 0.3, 0.2)).load()
    assert data.private.unit == "group:qid"
    assert set(map(len, index_by_unit(data.private).values())) == {8}
    with pytest.raises(ValueError, match=r"dataset\.group='qid'.*every row"):
        Libsvm(path=write_svm(tmp_path, x, y), group="qid").load()


def test_many_features_are_hashed_and_inner_products_survive(tmp_path):
    x, y = sparse(200, 50)
    path, options = write_svm(tmp_path, x, y), {"roles": "position"}
    dense = Libsvm(path=path, num_features=4096, **options).load().private.x
    hashed = Libsvm(path=path, num_features=4097, **options).load().private.x
    assert dense.shape == (160, 4096) and hashed.shape == (160, 1024)
    by_hand = dense.numpy() @ make_hashing_matrix(4097, 1024).toarray()[:4096]
    np.testing.assert_allclose(hashed.numpy(), by_hand, atol=1e-5)
    matrix = make_hashing_matrix(3000, 4000)
    assert (matrix.getnnz(axis=1) == 1).all() and set(matrix.data.tolist()) == {-1.0, 1.0}
    # A feature's place does not depend on how many there are.
    np.testing.assert_array_equal(matrix[:100].toarray(), make_hashing_matrix(100, 4000).toarray())
    a, b = np.random.default_rng(0).normal(size=(2, 3000))
    assert abs((a @ matrix) @ (b @ matrix) - a @ b) < 4 * 3000 / np.sqrt(4000)


def test_standardizing_uses_the_pool(tmp_path):
    x, y = sparse()
    x[:, 3] = 5
    data = Libsvm(path=write_svm(tmp_path, x, y), standardize=True).load()
    pool_x = data.pool.x.double()
    torch.testing.assert_close(torch.tensor(data.spec.mean, dtype=torch.float64), pool_x.mean(0))
    assert data.spec.std[3] == 1.0  # constant in the pool
    torch.testing.assert_close(torch.tensor(data.spec.std[0]), pool_x[:, 0].std(correction=0).float())


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("1 1:x\n", {}, "not a readable LIBSVM file"),
        ("<html>\n", {}, "not a readable LIBSVM file"),
        ("", {}, "has no rows"),
        ("1 0:1 2:3\n", {}, "zero_based=true"),
        ("1 1:nan\n" * 9, {"roles": "position", "fractions": (0.2, 0.6, 0.2)}, "public records.*not finite"),
        ("1 1:1e60\n" * 9, {"roles": "position", "fractions": (0.2, 0.6, 0.2)}, "public records.*not finite"),
        ("1 1:1\n" * 9, {}, "has no|must be declared"),
        ("1 1:1\n", {"roles": "position", "group": "qid"}, r"dataset\.roles=hash"),
        ("1 1:1\n", {"num_features": 0}, r"dataset\.num_features=0"),
        ("1 1:1\n", {"group": "user"}, r"dataset\.group='user': must be one of qid"),
    ],
)
def test_libsvm_files_are_refused_clearly(content, options, message, tmp_path):
    (tmp_path / "t.svm").write_text(content)
    with pytest.raises(ValueError, match=message):
        Libsvm(path=str(tmp_path / "t.svm"), **options).load()


def test_zero_based_files_and_huge_features_which_are_refused_in_public_rows_and_left_out_of_private_ones(tmp_path):
    rows = Path(write_svm(tmp_path, *sparse())).read_text()
    plain, absurd = tmp_path / "t.svm", tmp_path / "absurd.svm"
    absurd.write_text(rows + "1 2147483647:1\n")
    with pytest.raises(ValueError, match=r"num_features=None.*2147483647"):
        Libsvm(path=str(plain), public_path=str(absurd)).load()
    assert Libsvm(path=str(absurd), public_path=str(plain)).load().spec.input_shape[0] < 100
    (tmp_path / "t.svm").write_text("".join(f"{i % 2} 0:{i} 2:1\n" for i in range(100)))
    data = Libsvm(path=str(tmp_path / "t.svm"), zero_based=True, roles="position").load()
    assert data.spec.input_shape == (3,)
    assert data.private.x[:, 0].tolist() == data.private.unit_id.astype(float).tolist()
