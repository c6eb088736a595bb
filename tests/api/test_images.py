"""Images as users of PyTorch have them, through PATEClassifier, PATE and the released student."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import Subset, TensorDataset
from torchvision.transforms import v2

from pate_torch import PATE, ReleasedClassifier, load_student
from pate_torch.data.image_folder import ImageFolderDataset
from pate_torch.features.encoder import Encoder
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.students.training import Supervised
from tests.api.classifiers import make_classifier
from tests.worlds import images

X, Y = images(600, 0)
POOL, POOL_Y = images(40, 1)
CLASSES = ["a", "b", "c"]


class Corners(nn.Module):
    """Mean brightness of the four corners, and batch normalization: mixes points unless it is frozen."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)

    def forward(self, x):
        return nn.functional.avg_pool2d(self.norm(x), x.shape[-1] // 2).flatten(1)


@pytest.fixture
def make(tmp_path):
    def make(**options):
        shared = {"teacher": LogisticRegression(C=1e-2), "num_teachers": 12, "num_queries": 20, "method": "teachers"}
        shared |= {"student": Supervised(network="logistic", steps=60), "classes": [0, 1, 2]}
        return make_classifier(tmp_path, 300.0, **(shared | options))

    return make


def write_folder(folder, x, y):
    for row, (image, label) in enumerate(zip(x.numpy(), y.tolist(), strict=True)):
        file = folder / CLASSES[label] / f"{row:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(file)
    return folder


def test_a_dataset_is_fitted_and_predicted_like_its_array(make, tmp_path):
    fractions = X.float() / 255
    whole = make().fit(X, Y, public=POOL)
    assert whole.score(POOL, POOL_Y) > 0.8
    forms = [
        (fractions, Y, POOL.float() / 255),
        (X.numpy()[:, 0], Y, POOL.numpy()[:, 0]),
        (TensorDataset(X, Y), None, TensorDataset(POOL, POOL_Y)),
        (Subset(TensorDataset(fractions, Y), range(600)), None, TensorDataset(POOL / 255)),
    ]
    for x, y, public in forms:
        clf = make(home=tmp_path / str(len(list(tmp_path.iterdir())))).fit(x, y, public=public)
        assert clf.score(public, POOL_Y) > 0.8
    folders = [write_folder(tmp_path / name, *part) for name, part in {"own": (X, Y), "pool": (POOL, POOL_Y)}.items()]
    clf = make(home=tmp_path / "f", classes=CLASSES).fit(folders[0], public=str(folders[1]))
    truth = np.array([label for _, label in ImageFolderDataset(folders[1], (1, 8, 8))])
    assert clf.score(folders[1], truth) > 0.8
    released = ReleasedClassifier.load(clf.save_release(tmp_path / "release"))
    np.testing.assert_array_equal(released.predict(folders[1]), clf.predict(folders[1]))
    student = load_student(clf.release_)
    same = student.predict(POOL)
    for points in (POOL / 255, POOL[:, 0].numpy(), TensorDataset(POOL)):
        assert torch.equal(student.predict(points), same)


def test_public_images_that_are_private_ones_are_refused_by_every_way(make, tmp_path):
    own = write_folder(tmp_path / "own", X, Y)
    encoder = Encoder(module=Corners(), size=8, mean=[0.3], std=[0.3])
    blocks = TensorDataset(X, Y)
    for x, y, options in [(X / 255, Y, {}), (blocks, None, {"encoder": encoder}), (own, None, {"classes": CLASSES})]:
        with pytest.raises(ValueError, match=r"^public='.*': holds records of X"):
            make(**options).fit(x, y, public=x)


def test_forms_that_differ_are_refused_by_name(make, tmp_path):
    own = write_folder(tmp_path / "own", X, Y)
    for x, public, message in [
        (X, POOL.flatten(1).numpy(), "^public='ndarray uint8': must have the form of X, Tensor torch.uint8"),
        (X.flatten(1).numpy(), TensorDataset(POOL), "^public='TensorDataset': must have the form of X"),
        (X, POOL.float(), r"^public='float32 from 0 to 2.*whole numbers in 0\.\.255 or fractions in 0\.\.1"),
    ]:
        with pytest.raises(ValueError, match=message):
            make().fit(x, Y, public=public)
    with pytest.raises(ValueError, match=r"^adjacency='replace_one'.*position of an image"):
        make(adjacency="replace_one", classes=CLASSES).fit(own, public=POOL)


@pytest.mark.parametrize("x,y", [(X / 255, Y), (TensorDataset(X[:, :, :4], Y), None)], ids=["fractions", "other shape"])
def test_no_number_of_readable_images_refuses_a_run(make, x, y):
    """The public images are whole numbers [1, 8, 8], and no private one is. A readable one more must not decide."""
    assert len(make().fit(x, y, public=POOL).predict(POOL)) == len(POOL)


def test_an_encoder_of_images_reads_a_dataset_in_blocks(make, tmp_path, monkeypatch):
    """The features of whole arrays, bit for bit; the student of the release applies the encoder itself."""
    monkeypatch.setattr("pate_torch.data.streams._BLOCK_POINTS", 32)
    encoder = Encoder(module=Corners().eval(), size=8, mean=[0.3], std=[0.3], batch_size=4, disjoint=True)
    options = {"encoder": encoder, "method": "gradients", "teacher": None, "num_teachers": None, "num_queries": None}
    blocks = TensorDataset(X / 255, Y)
    fits = [
        make(home=tmp_path / name, student=None, random_state=0, **options).fit(x, y, public=pool)
        for name, x, y, pool in [("array", X, Y, POOL), ("dataset", blocks, None, TensorDataset(POOL / 255))]
    ]
    for clf in fits:
        assert clf.score(POOL, POOL_Y) > 0.8 and clf.student_.spec.encoder.points.input_shape == (1, 8, 8)
    features = [list((tmp_path / name).rglob("*-private-*.safetensors")) for name in ("array", "dataset")]
    assert [len(files) for files in features] == [1, 1]
    assert features[0][0].read_bytes() == features[1][0].read_bytes()
    student = load_student(fits[1].release_, encoder=encoder)
    expected = fits[1].predict_proba(TensorDataset(POOL))
    for points in (POOL, POOL / 255, TensorDataset(POOL)):
        np.testing.assert_allclose(student.compute_probabilities(points), expected, atol=1e-6)


def test_pate_takes_datasets_and_folders(tmp_path):
    own, pool = (write_folder(tmp_path / name, *part) for name, part in [("own", (X, Y)), ("pool", (POOL, POOL_Y))])
    options = {"classes": CLASSES, "num_teachers": 12, "mechanism": GNMax(sigma=0.5), "delta": 1e-5}
    options |= {"budget_epsilon": 1e3, "teacher": LogisticRegression(C=1e-2), "allow_uninformative_labels": True}
    resized = v2.Resize(8)
    for name, x, public in [
        ("folder", own, pool),
        ("dataset", TensorDataset(X, Y), TensorDataset(POOL / 255, POOL_Y)),
        ("array", X.numpy()[:, 0] / 255, POOL),
    ]:
        pate = PATE(name, home=tmp_path / name, **options)
        if name == "array":
            pate.fit_teachers(x, Y, public_x=public.float() / 255)
        elif name == "dataset":
            pate.fit_teachers(x, public_x=TensorDataset(POOL))
        else:
            pate.fit_teachers(x, public_x=public)
        release = pate.label(public, 30)
        truth = torch.tensor([CLASSES.index(label) for _, label in ImageFolderDataset(pool, (1, 8, 8))])
        truth = truth if name == "folder" else POOL_Y
        assert (release.label_Q == truth[release.query_Q]).float().mean() > 0.7
        assert pate.fit_student(Supervised(network="logistic", steps=60)).predict(resized(POOL)).shape == (40,)
    with pytest.raises(ValueError, match="public_x=None: must be given, because the public points fix the form"):
        PATE("other", home=tmp_path / "home", **options).fit_teachers(own)
    with pytest.raises(ValueError, match="adjacency='replace_one'"):
        from pate_torch.privacy.partition import ReplaceOne

        PATE("third", home=tmp_path / "home", partition=ReplaceOne(), **options).fit_teachers(own, public_x=pool)
