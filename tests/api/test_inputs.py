"""What a real table may hold, and guards against public points that do not fit the private records."""

import json
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from pate_torch import PATEClassifier, load_student
from pate_torch.api.inputs import PointTransform, encode_labels, find_unreadable_columns, parse_class_weight
from pate_torch.cli.main import main as pate
from pate_torch.privacy.records import OUTSIDE_STEPS, DataSpec
from pate_torch.students import store
from pate_torch.teachers.engine import Chunk, iterate_batches
from pate_torch.teachers.recipe import TeacherRecipe
from tests.worlds import clouds

X, Y = (part.numpy() for part in clouds(900, 0))
PUBLIC = clouds(150, 1)[0].numpy()
TEST, TRUTH = (part.numpy() for part in clouds(300, 2))


@pytest.fixture
def make(tmp_path):
    defaults = {"account": "c", "num_records_about": 900, "classes": [0, 1, 2], "home": tmp_path, "verbose": False}
    return lambda epsilon=4.0, **settings: PATEClassifier(epsilon, **(defaults | settings))


def make_transform(public, categories=None):
    return PointTransform.from_public(public, categories, is_encoded=False)[0]


def make_spec(transform):
    constants = {"mean": (0.0,), "std": (1.0,), "input_shape": (1, 4, 4)}
    if transform.mean is not None:
        low, high = map(tuple, transform.value_range)
        constants = {"mean": tuple(transform.mean), "std": tuple(transform.std), "low": low, "high": high,
                     "input_shape": (len(low),), "schema": transform.schema}  # fmt: skip
    return DataSpec(name="c", num_classes=2, class_names=("a", "b"), **constants)


def draw_rows(count, seed, missing=None):
    """Ill are the old. One ward in five is ``missing``."""
    draw = np.random.default_rng(seed)
    age, ward = draw.uniform(20, 80, count), draw.choice(["a", "b", missing], count, p=[0.4, 0.4, 0.2])
    return pd.DataFrame({"age": age, "ward": ward}), np.where(age > 50, "ill", "well")


# ---- numbers outside the public range ------------------------------------------------------------------------------


def add_columns(x, seed, *, spoiled):
    """Add a column that is constant among public points, and make one record in twenty an outlier."""
    draw, x = np.random.default_rng(seed), np.column_stack([x, np.full(len(x), 0.1)])
    if spoiled:
        x[:, 2] = draw.normal(0, 1e4, len(x))
        x[draw.random(len(x)) < 0.05, 0] = 1e9
    return x


SLOW = pytest.mark.slow(reason="trains networks; another test shows that their batches are clipped")


@pytest.mark.filterwarnings("ignore:public. about .* lie outside the range of the public points")
@pytest.mark.parametrize(
    "method", ["gradients", "estimator", *(pytest.param(m, marks=SLOW) for m in ("dpsgd", "teachers"))]
)
def test_outliers_and_columns_that_public_points_do_not_vary_do_no_harm(make, method):
    private, public = add_columns(X, 0, spoiled=True), add_columns(PUBLIC, 1, spoiled=False)
    settings = {"method": method}
    if method == "estimator":
        settings = {"method": "teachers", "teacher": LogisticRegression(), "num_teachers": 20, "num_queries": 20}
        settings["student"] = LogisticRegression()
    clf = make(40.0 if method == "teachers" else 8.0, **settings).fit(private, Y, public=public)
    test = add_columns(TEST, 2, spoiled=False)
    assert clf.score(test, TRUTH) > 0.85
    probability_NC = clf.predict_proba(test)
    test[:, 2] = 1e6 * np.arange(300)  # ignored
    assert np.array_equal(clf.predict_proba(test), probability_NC)


@pytest.mark.filterwarnings("ignore:public. about .* lie outside the range of the public points")
def test_the_classifier_its_release_and_the_command_line_clip_alike(make, tmp_path, capsys):
    (table, y), (public, _), (new, _) = (draw_rows(count, seed) for seed, count in enumerate((900, 200, 60)))
    clf = make(classes=["ill", "well"]).fit(table.assign(c=range(900)), y, public=public.assign(c=7))
    new = new.assign(c=1e3, age=new.age * 1000, ward="b")
    new.loc[:9, "age"] = [*np.linspace(20, 80, 10)]
    released = load_student(clf.release_)
    low, high = (np.array(part) for part in (released.spec.low, released.spec.high))
    assert (low[0], high[0]) == (np.float32(public.age).min(), np.float32(public.age).max())
    assert low[-1] == high[-1] == 7 and set(high[1:-1]) == {1}
    probability_NC = released.predict_proba(new).double().numpy()
    assert np.array_equal(probability_NC / probability_NC.sum(1, keepdims=True), clf.predict_proba(new))
    assert released.predict_names(new) == clf.predict(new).tolist() and len(set(clf.predict(new))) == 2
    new.to_csv(tmp_path / "new.csv", index=False)
    assert pate(["predict", str(clf.release_), str(tmp_path / "new.csv")]) == 0
    printed = capsys.readouterr().out
    assert [line.split(",")[1] for line in printed.splitlines()[1:]] == clf.predict(new).tolist()
    store.export(released, tmp_path / "student.pt2")
    exported = torch.export.load(tmp_path / "student.pt2").module()
    rows = released.encode(new)
    assert torch.allclose(exported(rows), released.compute_probabilities(rows), atol=1e-5)


def test_the_share_outside_the_range_is_exact_and_of_each_record_alone():
    public = pd.DataFrame({"a": [0.1, 0.7, None], "b": [3, 3, 3], "c": [1.0, 2.0, 5.0], "word": ["x", "y", "x"]})
    transform = make_transform(public)
    rows = [[0.1, 3, 5, "x"], [0.1000001, 3, 1, "z"], [0.0999, 3, 1, None], [0.7, 3.5, 9, "x"], [9e9, -1, 0, "y"],
            [None, float("inf"), "text", "x"], [0.5, 2, 1e300, "x"]]  # fmt: skip
    private = transform(pd.DataFrame(rows, columns=list(public)))
    spec = make_spec(transform)
    shares = spec.compute_outside_share(private)
    third, full = OUTSIDE_STEPS // 3, OUTSIDE_STEPS
    assert shares.dtype == torch.int64 and shares.tolist() == [0, 0, third, 2 * OUTSIDE_STEPS // 3, full, 0, third]
    assert [int(spec.compute_outside_share(row[None])[0]) for row in private] == shares.tolist()
    images = make_transform(np.zeros((2, 1, 4, 4), np.uint8))
    assert make_spec(images).compute_outside_share(torch.ones(3, 1, 4, 4)).tolist() == [0, 0, 0]
    words = make_transform(public[["word"]])
    assert make_spec(words).compute_outside_share(words(public[["word"]])).tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [0.1, 1.0, 0.0, -1e9, None])
@pytest.mark.parametrize("gap", [False, True])
def test_a_constant_column_becomes_zero_whatever_a_record_holds(value, gap):
    public = np.array([[value, row / 10] for row in range(37)], dtype=float)
    if gap:
        public[3, 0] = np.nan
    for points in (public, pd.DataFrame(public)):
        transform, pool = PointTransform.from_public(points, None, is_encoded=False)
        low, high = transform.value_range
        spec = DataSpec(name="c", num_classes=2, input_shape=(2,), class_names=("a", "b"), mean=tuple(transform.mean),
                        std=tuple(transform.std), low=tuple(low), high=tuple(high))  # fmt: skip
        odd = transform(np.array([[v, 0.5] for v in (0, 1, 1e30, -7.5, np.nan)])) if points is public else pool
        assert spec.normalize(torch.cat([pool, odd]))[:, 0].abs().max() < 1e-6


def test_networks_are_trained_on_clipped_records():
    spec = DataSpec(name="c", num_classes=2, input_shape=(1,), class_names=("a", "b"), mean=(2.0,), std=(2.0,),
                    low=(0.0,), high=(4.0,))  # fmt: skip
    chunk = Chunk(0, torch.tensor([[[-9.0], [1e9]]]), torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]))
    recipe = TeacherRecipe(network="logistic", steps=4, batch_size=2)
    batches = [x for x, _ in iterate_batches(chunk, spec, recipe, 0, torch.device("cpu"))]
    assert torch.cat(batches).unique().tolist() == [-1, 1]


def test_declared_categories_that_no_public_point_shows_are_kept():
    transform = make_transform(pd.DataFrame({"ward": ["a", "a"]}), {"ward": ["a", "b"]})
    rows = transform(pd.DataFrame({"ward": ["a", "b", "c"]}))
    assert make_spec(transform).normalize(rows).tolist() == [[1, 0], [0, 1], [0, 0]]


def test_a_range_that_contradicts_itself_is_refused():
    spec = {"name": "c", "num_classes": 2, "input_shape": (1,), "class_names": ("a", "b")}
    spec |= {"mean": (0.0,), "std": (1.0,)}
    whole = DataSpec(**spec, low=(0.0,), high=(2.0,))
    assert DataSpec.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole
    for changes in ({"low": (0.0,)}, {"low": (3.0,), "high": (2.0,)}, {"low": (0.0, 1.0), "high": (2.0, 2.0)}):
        with pytest.raises(ValueError, match=r"^low="):
            DataSpec(**spec, **changes)
    with pytest.raises(ValueError, match="low="):
        DataSpec.from_dict(whole.to_dict() | {"low": ["0"]})


# ---- private records as public points ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "part"),
    [("array", "all"), ("array", "view"), ("tensor", "view"), ("frame", "view"), ("frame", "copy"), ("list", "copy")],
)
def test_private_records_are_refused_as_public_points(make, form, part):
    x = {"array": X, "tensor": torch.from_numpy(X), "frame": pd.DataFrame(X, columns=["a", "b"]), "list": X.tolist()}[
        form
    ]
    view = x.iloc[:300] if form == "frame" else x[:300]
    copies = {"array": np.copy, "tensor": torch.clone, "frame": pd.DataFrame.copy, "list": list}
    public = {"all": x, "view": view, "copy": copies[form](view)}[part]
    with pytest.raises(ValueError, match=r"public=.*holds records of X.*split_public"):
        make().fit(x, Y, public=public)


def test_a_few_equal_points_are_a_warning_to_the_owner_and_other_rows_of_one_array_are_allowed(make):
    whole = np.concatenate([X, PUBLIC])
    public = whole[900:]
    make().fit(whole[:900], Y, public=public)
    with pytest.warns(UserWarning, match="3 of 150 distinct public points equal private records"):
        clf = make(allow_refit=True).fit(X, Y, public=np.concatenate([X[:3], X[:1], PUBLIC[3:]]))
    for file in clf.release_.rglob("*"):
        assert not file.is_file() or b"distinct public points" not in file.read_bytes()


SEXES = pd.DataFrame({"sex": ["f", "m"] * 20, "age": np.linspace(20, 80, 40)})


@pytest.mark.parametrize("form", ["table", "array", "list"])
@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"sex": lambda x: (x.sex == "f").astype(int)}, "sex"),
        ({"age": lambda x: x.age.map("{:.2f}".format).str.replace(".", ",")}, "age"),
        ({"age": lambda x: x.age.map("{:.2f}".format)}, None),
        ({"age": lambda x: [None, "NA"] * 20, "sex": lambda x: ["m", None, "f", "d"] * 10}, None),
    ],
    ids=["codes", "decimal commas", "texts of numbers", "missing"],
)
def test_columns_that_cannot_be_read_are_found(form, changes, found):
    private, public = SEXES.assign(**changes), SEXES
    if form != "table":
        private, public, found = (
            private.to_numpy(object),
            public.to_numpy(object),
            {"sex": "x0", "age": "x1"}.get(found),
        )
    schema = make_transform(public).schema
    expected = {} if found is None else {found: 1.0}
    assert find_unreadable_columns(private.tolist() if form == "list" else private, schema) == expected


def test_an_owner_finds_unreadable_columns_before_a_charge(make, tmp_path):
    table = pd.DataFrame(X, columns=["a", "b"])
    commas = table.assign(b=np.char.replace(X[:, 1].astype(str), ".", ","))
    public = pd.DataFrame(PUBLIC, columns=["a", "b"])
    assert make().find_unreadable_columns(commas, public) == {"b": 1.0}
    assert make().find_unreadable_columns(table, public) == make().find_unreadable_columns(X, PUBLIC) == {}
    assert not list(tmp_path.rglob("ledger*"))


def test_rows_that_are_equal_by_chance_are_no_reason(make, recwarn):
    draw = np.random.default_rng(0)
    dose = draw.choice([0.5, 1.0, 2.0], (1000, 2))
    make(classes=[0, 1]).fit(dose[:900], dose[:900, 0] > 0.7, public=dose[900:].copy())
    assert not [warning for warning in recwarn if "distinct public" in str(warning.message)]


# ---- missing values, types -----------------------------------------------------------------------------------------


def test_a_missing_category_is_a_category_where_public_rows_lack_it():
    table = pd.DataFrame({"ward": ["a", None, "b"], "age": [1.0, None, 3.0]})
    transform = make_transform(table)
    assert transform.schema.feature_names == ("ward=", "ward=a", "ward=b", "age")
    assert transform(pd.DataFrame({"ward": [None, "c"], "age": [2, 2]})).tolist() == [[1, 0, 0, 2], [0, 0, 0, 2]]
    assert make_transform(table.dropna()).schema.feature_names == ("ward=a", "ward=b", "age")


def test_unknown_categories_are_counted_by_column(make):
    (table, y), (public, _), (new, _) = (draw_rows(count, seed, "c") for seed, count in enumerate((900, 200, 60)))
    clf = make(classes=["ill", "well"]).fit(table, y, public=public)
    assert clf.unknown_counts_ == {}
    with pytest.warns(UserWarning, match="'ward'") as warned:
        clf.predict(new.assign(ward=["d", None, *new.ward[2:]]))
    assert clf.unknown_counts_ == {"ward": 2} and len(warned) == 1
    clf.predict(new)
    assert clf.unknown_counts_ == {"ward": 0}


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA], ids=str)
@pytest.mark.parametrize("labels", [[1, 0, 1], ["b", "a", "b"], [True, False, True], [2.0, 1.0, 2.0]], ids=str)
def test_a_record_without_a_label_has_no_class(labels, missing):
    classes = sorted(set(labels))
    for y in ([*labels, missing], np.array([*labels, missing], object), pd.Series([*labels, missing], dtype=object)):
        for given in (classes, None):
            class_C, label_N = encode_labels(np.asarray(y, dtype=object), given)
            assert class_C.tolist() == classes and label_N.tolist() == [1, 0, 1, -1]


@pytest.mark.parametrize(
    "odd", [np.zeros(2), np.zeros(0), pd.Series([1, 2]), Decimal("sNaN"), [1], {}, 2**70], ids=repr
)
def test_a_label_of_any_type_affects_no_other_label(odd):
    y = np.array([1, 0, None, 1], dtype=object)
    y[2] = odd
    assert encode_labels(y, [0, 1])[1].tolist() == [1, 0, -1, 1]


def test_the_type_that_one_label_gives_to_all_labels_changes_no_class():
    for y in (np.array([0, 1, 1]), np.array([0, 1, 1, np.nan]), np.array([0, 1, 1, None])):
        class_C, label_N = encode_labels(y, None)
        assert class_C.dtype == np.int64 and class_C.tolist() == [0, 1] and label_N[:3].tolist() == [0, 1, 1]
    for classes in ([False, True], [0, 1], ["0", "1"]):
        for odd in (True, 2, 0.5, 1j, "odd", None):  # NumPy finds a type for all
            assert encode_labels(np.array([False, True, True, odd]), classes)[1][:3].tolist() == [0, 1, 1]


@pytest.mark.parametrize(("declared", "missing"), [(False, float("nan")), (True, None)], ids=str)
def test_records_without_labels_contribute_nothing(make, declared, missing):
    settings = {"classes": ["0", "1", "2"]} if declared else {"classes": None, "classes_are_public": True}
    strange = np.full((5, 2), 1e6)
    clf = make(**settings).fit(np.vstack([X, strange]), [*map(str, Y), *[missing] * 5], public=PUBLIC)
    assert clf.classes_.tolist() == ["0", "1", "2"] and clf.score(TEST, TRUTH.astype(str)) > 0.85


def test_labels_of_several_types_must_be_listed():
    with pytest.raises(ValueError, match=r"classes=None: must be listed"):
        encode_labels(np.array(["a", 1, "b"], dtype=object), None)
    with pytest.raises(ValueError, match="at least 2 classes"):
        encode_labels(np.array([None, None], dtype=object), None)


FORMS = {
    "lists": lambda table: table.to_numpy(object).tolist(),
    "nullable": lambda table: table.convert_dtypes(),
    "categories": lambda table: table.astype({"ward": "category"}),
    "booleans": lambda table: table.assign(ward=table.ward == "a"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_table_of_any_type_goes_in_and_comes_out(make, form):
    (table, y), (public, _), (new, truth) = (draw_rows(count, seed) for seed, count in enumerate((900, 200, 300)))
    clf = make(classes=[False, True]).fit(FORMS[form](table), y == "ill", public=FORMS[form](public))
    assert clf.score(FORMS[form](new), truth == "ill") > 0.85 and clf.predict(FORMS[form](new)).dtype == bool
    if form == "lists":
        assert clf._transform.schema.feature_names[:2] == ("x0", "x1=")
        student, cells = load_student(clf.release_), new.to_numpy(object)
        assert (student.predict(cells).numpy() == clf.predict(cells)).all()
        with pytest.warns(UserWarning, match="'x1'"):
            clf.predict([[50.0, "never"]])


def test_one_private_word_changes_no_type(make):
    x = X.astype(object)
    x[0, 0] = "high"
    clf = make().fit(x, Y, public=PUBLIC)
    assert clf._transform.schema is None and clf.score(TEST, TRUTH) > 0.85


def test_public_points_in_other_units_are_told_by_a_noisy_share(make):
    with pytest.warns(UserWarning, match="or more lie outside the range of the public points"):
        make(account="meters").fit(X, Y, public=PUBLIC / 100)
    make(account="feet", allow_duplicate_account=True).fit(X, Y, public=PUBLIC)  # warnings are errors


def test_class_weights_are_those_of_the_classes_in_their_order():
    assert parse_class_weight(None, ["a", "b"]).tolist() == [1, 1] and parse_class_weight("balanced", [0, 1]) is None
    assert parse_class_weight({True: 2.5}, [0, 1.0]).tolist() == [1, 2.5]  # 1 and True are one class
    assert parse_class_weight({"b": 4}, ["a", "b"]).tolist() == [1, 4]


@pytest.mark.parametrize(
    "given,message",
    [("even", "class_weight='even'"), ({2: 1.0}, "is no class"), ({0: 0.0}, "greater than 0"), ([1, 2], "keys"),
     ({0: float("nan")}, "finite")],
)  # fmt: skip
def test_weights_that_cannot_be_meant_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        parse_class_weight(given, [0, 1])
