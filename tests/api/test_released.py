"""What the receiver of a release gets: a scikit-learn classifier that says what the owner's classifier says."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from safetensors.torch import save_file
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch.utils.data import TensorDataset

from pate_torch import PATE, ReleasedClassifier, load_student, networks
from pate_torch.cli.main import main as pate
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.records import DataSpec
from pate_torch.privacy.schema import Column, TableSchema
from pate_torch.release.report import Share
from pate_torch.students import store
from pate_torch.students.base import Student
from pate_torch.students.numpy_student import NumpyStudent
from tests import ROOT
from tests.api.classifiers import draw_table, make_classifier
from tests.students.tasks import FRAME, ROWS, TABLE, make_student
from tests.worlds import IMAGES, clouds

PROBE = {"of": {"name": "fourier", "options": {"cosines": 20, "knots": 6}}, "directions": 7}
FILLED = dataclasses.replace(TABLE, schema=TableSchema((Column("age", None, 33.0), Column("ward", ("A", "B")))))
QUERY, TRUTH = draw_table(300, 2)


def make_linear(spec, name, **options):
    """A linear student of random weights, whose cosines are random, too."""
    description = networks.describe(name, spec.input_shape, spec.num_classes, **options)
    module, draw = networks.rebuild(description), torch.Generator().manual_seed(1)
    for value in (*module.parameters(), *module.buffers()):
        value.data = torch.randn(value.shape, generator=draw)
    return Student(description, module.eval(), spec)


def save(student, folder):
    folder.mkdir(parents=True, exist_ok=True)
    store.save(student, folder / "student.safetensors")
    return folder


@pytest.fixture(scope="module")
def owner(tmp_path_factory):
    """The classifier of an owner whose classes are numbers, and who publishes an accuracy."""
    home, (x, y), (public, _) = tmp_path_factory.mktemp("owner"), draw_table(900, 0), draw_table(200, 1)
    classifier = make_classifier(home, account="clinic", classes=[7, 3])
    classifier.fit(x, np.where(y == "ill", 7, 3), public=public)
    with pytest.warns(UserWarning, match="'ward'"):  # the warning of a public test point's category
        evaluated = QUERY.assign(ward=QUERY.ward.where(QUERY.index > 0, "z"))
        classifier.save_release(home / "with", evaluation=(evaluated, np.where(TRUTH == "ill", 7, 3)))
    classifier.save_release(home / "without")
    return classifier, home


@pytest.mark.parametrize(
    ("name", "options"),
    [("logistic", {}), ("fourier", {"cosines": 20}), ("probe", {"directions": 5}), ("probe", PROBE)],
    ids=["logistic", "fourier", "scaled", "scaled cosines"],
)
@pytest.mark.parametrize("spec", [ROWS, TABLE, IMAGES], ids=["rows", "table", "images"])
def test_numpy_says_what_torch_says(tmp_path, spec, name, options):
    student = make_linear(spec, name, **options)
    linear = NumpyStudent.load(save(student, tmp_path) / "student.safetensors")
    draw = np.random.default_rng(0)
    x = draw.integers(0, 255, (50, *spec.input_shape), np.uint8)
    x = x if spec.is_image else (x / 50).astype(np.float32)
    expected = student.compute_probabilities(x).numpy()
    assert np.abs(expected - 1 / spec.num_classes).max() > 0.1
    np.testing.assert_allclose(linear.compute_probabilities(x), expected, atol=1e-5)


def test_the_public_range_clips_rows_as_the_header_says(tmp_path):
    linear = NumpyStudent.load(save(make_linear(ROWS, "logistic"), tmp_path) / "student.safetensors")
    clipped = dataclasses.replace(linear, spec={**linear.spec, "low": [-1.0] * 6, "high": [1.0] * 6})
    x = np.random.default_rng(0).normal(size=(9, 6), scale=3).astype(np.float32)
    np.testing.assert_array_equal(clipped.compute_probabilities(x), linear.compute_probabilities(x.clip(-1, 1)))


def test_the_receiver_predicts_what_the_owner_predicts(owner):
    classifier, home = owner
    released = ReleasedClassifier.load(home / "without")
    assert isinstance(released._student, NumpyStudent)
    assert released.classes_.tolist() == [7, 3] == classifier.classes_.tolist()
    student = copy.deepcopy(classifier.student_)  # of steep weights: float32 is right to 1e-4
    rows, student = student.spec.normalize(classifier._transform(QUERY)), student.module.double()
    layers = [layer for layer in student.modules() if isinstance(layer, networks.L2Normalize)]
    for layer in layers:
        layer.forward = lambda x: torch.nn.functional.normalize(x.flatten(1), dim=1)
    exact = student(rows.double()).softmax(1).detach().numpy()
    np.testing.assert_allclose(released.predict_proba(QUERY), exact, atol=1e-8)
    np.testing.assert_allclose(released.predict_proba(QUERY), classifier.predict_proba(QUERY), atol=2e-4)
    assert released.predict_proba(QUERY).dtype == np.float64
    assert released.score(QUERY, np.where(TRUTH == "ill", 7, 3)) > 0.9
    assert released.feature_names_in_.tolist() == ["age", "ward"]
    assert released.predict(QUERY[:0]).shape == (0,)


def test_records_frames_and_columns_are_one(owner):
    released = ReleasedClassifier.load(owner[1] / "without")
    rows = QUERY.head(30)
    expected = released.predict_proba(rows)
    records = rows.to_dict("records")
    for points in (records, rows.to_dict("list"), rows[["ward", "age"]].assign(unused=1)):
        np.testing.assert_array_equal(released.predict_proba(points), expected)
    np.testing.assert_allclose(released.predict_proba(records[4]), expected[4:5], atol=1e-12)
    assert released.predict(records[4]).shape == (1,)
    with pytest.raises(ValueError, match="lacks the columns ward"):
        released.predict({"age": 50})


def test_missing_and_unknown_categories_warn_once_and_name_the_columns(owner):
    classifier, home = owner
    released = ReleasedClassifier.load(home / "without")
    rows = pd.DataFrame({"age": [np.nan, 60.0, np.inf], "ward": ["a", None, "zz"]})
    with pytest.warns(UserWarning, match="'ward'") as warned:
        probabilities = released.predict_proba(rows)
    assert len(warned) == 1
    with pytest.warns(UserWarning, match="'ward'"):
        np.testing.assert_allclose(probabilities, classifier.predict_proba(rows), atol=2e-4)


def test_a_missing_number_without_a_public_value_is_an_error(tmp_path):
    released = ReleasedClassifier.load(save(make_linear(TABLE, "logistic"), tmp_path))
    with pytest.raises(ValueError, match=r"age='' \(row 0\)"):
        released.predict({"age": None, "ward": "A"})


@pytest.mark.parametrize(
    ("classes", "values"),
    [([True, False], [True, False]), ([1.5, 2.0], [1.5, 2.0]), (["1", "01"], ["1", "01"]), (2, [0, 1]),
     (np.array([4, 2], np.uint8), [4, 2]), ([1, "a"], ["1", "a"])],
)  # fmt: skip
def test_classes_keep_the_type_in_which_they_were_declared(tmp_path, classes, values):
    pate = PATE("types", classes=classes, num_teachers=2, mechanism=GNMax(sigma=1.0), delta=1e-5, home=tmp_path)
    spec = pate.make_spec(torch.zeros(4, 6), torch.randn(4, 6))
    for name in ("logistic", "mlp"):
        loaded = ReleasedClassifier.load(save(make_student(spec, name), tmp_path / name))
        assert loaded.classes_.tolist() == values
        assert type(loaded.classes_.tolist()[0]) is type(values[0])
        assert set(loaded.predict(np.random.default_rng(0).normal(size=(9, 6))).tolist()) <= set(values)


def normalize(probability_NC):
    return probability_NC.double().numpy() / probability_NC.double().numpy().sum(1, keepdims=True)


def test_networks_images_and_sparse_rows(tmp_path):
    images = ReleasedClassifier.load(save(make_student(IMAGES, "small_cnn"), tmp_path / "images"))
    x = np.random.default_rng(0).integers(0, 255, (5, 1, 8, 8), np.uint8)
    expected = normalize(load_student(tmp_path / "images").compute_probabilities(x))
    np.testing.assert_array_equal(images.predict_proba(x), expected)
    for same in (x / 255, x[:, 0], TensorDataset(torch.from_numpy(x))):
        np.testing.assert_array_equal(images.predict_proba(same), expected)
    with pytest.raises(ValueError, match=r"float64 from 0 to .*must be whole numbers"):
        images.predict(x * 1.0)
    table = ReleasedClassifier.load(save(make_student(FILLED, "mlp"), tmp_path / "table"))
    student = load_student(tmp_path / "table")
    np.testing.assert_array_equal(table.predict_proba(FRAME), normalize(student.compute_probabilities(FRAME)))
    rows = ReleasedClassifier.load(save(make_student(ROWS, "mlp"), tmp_path / "rows"))
    x = np.eye(6)
    np.testing.assert_array_equal(rows.predict_proba(scipy.sparse.csr_matrix(x)), rows.predict_proba(x))
    gap = np.where(x == 1, np.nan, 0.0)  # the mean of the public points, 0
    np.testing.assert_array_equal(rows.predict_proba(gap), rows.predict_proba(np.zeros((6, 6))))


def test_clone_pickle_parameters_and_repr(owner, tmp_path):
    released = ReleasedClassifier.load(owner[1] / "without")
    assert repr(released) == f"ReleasedClassifier(path={owner[1] / 'without'!r})"
    assert released.get_params() == {"path": owner[1] / "without"}
    for same in (clone(released), pickle.loads(pickle.dumps(released)), copy.deepcopy(released)):
        np.testing.assert_array_equal(same.predict_proba(QUERY), released.predict_proba(QUERY))
    with pytest.raises(ValueError, match="cannot be trained further"):
        released.fit(QUERY, TRUTH)
    with pytest.raises(ValueError, match="cannot be trained further"):
        cross_val_score(released, QUERY, TRUTH, error_score="raise")
    with pytest.raises(ValueError, match=r"has no student: call ReleasedClassifier\.load"):
        ReleasedClassifier("somewhere").predict(QUERY)
    with pytest.raises(ValueError, match="must be a student file or a folder"):
        ReleasedClassifier.load(tmp_path)


@pytest.mark.parametrize("change", ["spec", "names", "weights", "width", "classes"])
def test_a_file_whose_parts_contradict_each_other_is_refused(tmp_path, change):
    tensors = {"1.weight": torch.zeros(2, 6), "1.bias": torch.zeros(2)}
    network = networks.describe("logistic", (6,), 2)
    facts = {"format": store.FORMAT, "network": network, "spec": ROWS.to_dict()}
    if change == "spec":
        facts["spec"] = {"input_shape": "many"}
    elif change == "names":
        tensors["2.bias"] = torch.zeros(2)
    elif change == "weights":
        tensors["1.weight"] = torch.zeros(3, 6)
    elif change == "width":
        facts["spec"]["input_shape"] = [1 << 40]
    else:
        facts["spec"]["class_names"] = ["a", "b", "c"]
    save_file(tensors, tmp_path / "student.safetensors", metadata={store.METADATA_KEY: json.dumps(facts)})
    with pytest.raises(ValueError, match=r"^student=.*does not fit the network in its header") as refused:
        ReleasedClassifier.load(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_linear_release_is_loaded_and_used_without_torch(owner):
    code = (
        "import json, sys, pate_torch\n"
        "clf = pate_torch.ReleasedClassifier.load(sys.argv[1])\n"
        "print(json.dumps([clf.predict_proba({'age': 61, 'ward': 'a'}).tolist(), 'torch' in sys.modules]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, owner[1] / "without"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    probabilities, has_torch = json.loads(run.stdout)
    assert not has_torch
    here = ReleasedClassifier.load(owner[1] / "without").predict_proba({"age": 61, "ward": "a"})
    np.testing.assert_array_equal(probabilities, here)


# ---- the accuracy of a release --------------------------------------------------------------------------------------


def test_an_accuracy_is_published_in_the_copy_alone(owner, capsys):
    classifier, home = owner
    released = ReleasedClassifier.load(home / "with")
    with pytest.warns(UserWarning, match="'ward'"):
        right = released.predict(QUERY.assign(ward=QUERY.ward.where(QUERY.index > 0, "z")))
    accuracy = float((right == np.where(TRUTH == "ill", 7, 3)).mean())
    low, high = Share(value=accuracy, size=300).interval
    published = json.loads((home / "with" / "privacy.json").read_text())["utility"]
    assert published["student"] == {"accuracy": accuracy, "low": low, "high": high, "points": 300}
    assert [row["points"] for row in published["classes"]] == [(TRUTH == "ill").sum(), (TRUTH != "ill").sum()]
    words = f"{100 * accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
    assert words in (home / "with" / "README.md").read_text()
    assert words.replace(" %", "\u00a0%").split(" (")[0] in (home / "with" / "report.html").read_text()
    assert "300 test points" in (home / "with" / "README.md").read_text()
    assert json.loads((home / "with" / "summary.json").read_text())["student_accuracy"] == accuracy
    for folder in (home / "without", classifier.release_):
        assert json.loads((folder / "privacy.json").read_text())["utility"]["student"] is None
    for folder in ("with", "without"):
        assert pate(["verify", str(home / folder)]) == 0
    assert "FAILS" not in capsys.readouterr().out


def test_a_pickled_classifier_publishes_the_same_accuracy(owner, tmp_path):
    classifier, _ = owner
    again = pickle.loads(pickle.dumps(classifier))
    evaluation = (QUERY.iloc[1:], [7 if label == "ill" else 3 for label in TRUTH[1:]])
    for index, one in enumerate((classifier, again)):
        one.save_release(tmp_path / str(index), evaluation=evaluation)
    first, second = (json.loads((tmp_path / str(index) / "privacy.json").read_text()) for index in range(2))
    assert first == second and first["utility"]["student"]["points"] == 299
    with pytest.raises(TypeError):
        again._report.record.parameters["sigma"] = 0.0


@pytest.mark.parametrize(
    ("labels", "found"), [([7] * 299 + [5], "1 of no class"), ([7], "1 labels"), ([None] * 300, "y")]
)
def test_wrong_test_labels_leave_no_folder(owner, tmp_path, labels, found):
    with pytest.raises(ValueError, match=found):
        owner[0].save_release(tmp_path / "new", evaluation=(QUERY, labels))
    assert not (tmp_path / "new").exists()


def test_a_student_outside_the_release_has_no_accuracy_there(tmp_path):
    x, y = (part.numpy() for part in clouds(300))
    fitted = make_classifier(tmp_path, method="teachers", student=LogisticRegression(), spend_anyway=True)
    fitted.fit(x, y, public=x[:100] + 0.1)
    with pytest.raises(ValueError, match=r"evaluation=.*needs a student in the release"):
        fitted.save_release(tmp_path / "new", evaluation=(x, y))


# ---- scikit-learn's checks ------------------------------------------------------------------------------------------


class Relearned(ReleasedClassifier):
    """A released classifier whose ``fit`` makes a release, so that scikit-learn can check the rest."""

    def __sklearn_clone__(self):
        return type(self)(self.path)

    def fit(self, X, y):
        X = X.toarray() if hasattr(X, "toarray") else X
        x, y = validate_data(self, X, y, dtype=np.float64, ensure_all_finite="allow-nan")
        names = getattr(self, "feature_names_in_", None)
        check_classification_targets(y)
        classes, labels = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise ValueError("needs at least two classes, but there is one class")
        model = LogisticRegression(max_iter=1000).fit(np.nan_to_num(x), labels)
        weight, bias = (
            (np.vstack([-part, part]) / 2 if len(classes) == 2 else part)
            for part in (model.coef_, model.intercept_[:, None])
        )
        kinds = {"b": "bool", "i": "int", "u": "int", "f": "float"}
        spec = DataSpec(
            name="checks", num_classes=len(classes), input_shape=(x.shape[1],), class_names=tuple(map(str, classes)),
            mean=(0.0,) * x.shape[1], std=(1.0,) * x.shape[1], class_type=kinds.get(classes.dtype.kind),
        )  # fmt: skip
        module = networks.rebuild(description := networks.describe("logistic", spec.input_shape, len(classes)))
        module.load_state_dict({"1.weight": torch.from_numpy(weight), "1.bias": torch.from_numpy(bias[:, 0])})
        with tempfile.TemporaryDirectory() as folder:
            released = ReleasedClassifier.load(save(Student(description, module, spec), Path(folder)))
        vars(self).update(vars(released) | {"path": self.path})
        if names is not None:
            self.feature_names_in_ = names
        return self


EXPECTED_FAILURES: dict[str, str] = {}


@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_finds_nothing_but_what_is_listed():
    results = check_estimator(Relearned(), expected_failed_checks=EXPECTED_FAILURES, on_skip=None, on_fail=None)
    failed = {result["check_name"]: str(result["exception"]) for result in results if result["status"] == "failed"}
    assert failed == {}
    assert {r["check_name"] for r in results if r["status"] == "xfail"} == set(EXPECTED_FAILURES)
    assert sum(result["status"] == "passed" for result in results) > 45
