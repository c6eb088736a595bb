"""How teachers are dealt and launched: by groups of 16, within a GPU's memory, from public numbers alone."""

import inspect
import itertools

import pytest
import torch

from pate_torch import networks
from pate_torch.privacy.records import DataSpec
from pate_torch.teachers import launch, stacked, training
from pate_torch.teachers.recipe import TeacherRecipe
from tests.teachers.teacher_world import recipe, records, shards_of, spec

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def images(size=32, channels=3, classes=10):
    names = tuple(map(str, range(classes)))
    half = (0.5,) * channels
    return DataSpec(
        name="images", num_classes=classes, input_shape=(channels, size, size), class_names=names, mean=half, std=half
    )


def train_size(recipe, spec, num_teachers, device):
    module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    return launch.compute_train_size(recipe, networks.count_parameters(module), spec, num_teachers, device)


def test_no_record_decides_how_many_are_launched():
    """Else one more in the largest shard could change the last bits of every teacher, and votes of all."""
    assert set(inspect.signature(launch.compute_train_size).parameters) == {
        *("recipe", "num_parameters", "spec", "num_teachers", "device")
    }
    assert set(inspect.signature(launch.compute_gpu_points).parameters) == {"spec"}


@pytest.mark.parametrize("num_teachers", [1, 15, 16, 17, 50, 250, 10_000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_every_teacher_is_dealt_once_and_no_rank_has_two_groups_more(num_teachers, ranks):
    groups = launch.split_groups(num_teachers)
    assert list(itertools.chain(*groups)) == list(range(num_teachers))
    assert all(len(group) == launch.GROUP_TEACHERS == 16 for group in groups[:-1])
    owner = launch.assign_owners(len(groups), ranks)
    assert owner == sorted(owner) and max(owner) < ranks
    loads = [owner.count(rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= 1


def efficiency(num_teachers: int, ranks: int) -> float:
    """The share of the ranks' time that is spent on teachers, where all take equally long."""
    sizes = [len(group) for group in launch.split_groups(num_teachers)]
    owner = launch.assign_owners(len(sizes), ranks)
    busiest = max(sum(size for size, one in zip(sizes, owner, strict=True) if one == rank) for rank in range(ranks))
    return num_teachers / (ranks * busiest)


def test_the_ranks_of_eight_and_of_sixty_four_gpus_are_busy():
    assert efficiency(250, 8) >= 0.95 and efficiency(10_000, 64) >= 0.95
    assert efficiency(250, 1) == 1
    by_hand = {50: 50 / (8 * 16), 100: 100 / (8 * 16)}  # four and seven groups: other ranks idle
    assert {k: efficiency(k, 8) for k in by_hand} == pytest.approx(by_hand)


@pytest.mark.parametrize("size", [1, 3, 10, 15, 16, 17, 40, 48, 250])
def test_launches_cover_what_is_to_be_done_and_nothing_else(size):
    groups = launch.split_groups(250)
    for todo in (groups, groups[3:7], [groups[0], groups[2], groups[3], groups[15]], []):
        planned = launch.plan_launches(todo, size)
        assert sorted(itertools.chain(*planned)) == sorted(itertools.chain(*todo))
        assert all(len(teachers) <= max(1, size if size < 16 else size - size % 16) for teachers in planned)
        if size < 16:  # within a group: what else is to be done changes nothing
            assert all(teachers.start // 16 == (teachers.stop - 1) // 16 for teachers in planned)


@pytest.mark.parametrize("network", ["logistic", "lean_cnn", "convnet"])
def test_launches_on_a_cpu_follow_from_public_numbers(network):
    for teachers in (1, 7, 48, 250, 1000, 5000):
        size = train_size(TeacherRecipe(network=network, options={}), spec(), teachers, CPU)
        assert 1 <= size <= 16
    assert train_size(TeacherRecipe(chunk=12), spec(), 250, CPU) == 12
    assert train_size(TeacherRecipe(chunk=64), spec(), 250, CPU) == 16


def test_a_gpu_gets_whole_groups_or_a_few_teachers_on_large_images():
    recipe = TeacherRecipe(network="convnet", options={})
    sizes = {pixels: train_size(recipe, images(pixels), 10_000, GPU) for pixels in (28, 32, 64, 224)}
    assert sizes == {28: 160, 32: 128, 64: 32, 224: 2}  # 18 GiB of activations each
    assert train_size(TeacherRecipe(batch_size=10**6), images(), 250, GPU) == 1
    assert train_size(TeacherRecipe(chunk=200), images(), 10_000, GPU) == 200
    rows = images(1, channels=1)
    for teachers in (75, 250):  # the last group is not whole, and belongs to the launch all the same
        size = train_size(TeacherRecipe(network="logistic", options={}), rows, teachers, GPU)
        assert launch.plan_launches(launch.split_groups(teachers), size) == [range(teachers)]
    assert [launch.compute_gpu_points(images(pixels)) for pixels in (1, 32, 64, 224, 10_000)] == [512, 256, 64, 5, 1]


def test_teachers_that_do_not_fit_into_a_gpu_name_the_key(monkeypatch):
    def exhaust(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(training, "train_stacked", exhaust)
    with pytest.raises(ValueError, match=r"teacher\.chunk=3: 2 teachers at once do not fit"):
        training.train(records(9), spec(), shards_of([[0, 1], [2, 3]]), recipe(), seed=0)


def test_killed_ranks_and_workers_leave_whole_groups_and_the_same_bits(tmp_path):
    """Units kept by one way of running are taken up by every other."""
    shards = shards_of([list(range(k * 3, k * 3 + 3)) for k in range(40)])
    private = records(120)
    recipe = TeacherRecipe(network="logistic", options={}, steps=3, batch_size=2, chunk=7)

    def train(folder, **changes):
        other = TeacherRecipe(**{**recipe.__dict__, **changes})
        return training.train(private, spec(), shards, other, seed=0, checkpoint_dir=folder).params

    whole = train(tmp_path / "a")
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    assert [file.name[:11] for file in files] == ["chunk_00000", "chunk_00016", "chunk_00032"]
    files[1].unlink()
    (tmp_path / "a" / files[2].name).write_bytes(b"torn")
    for changes in ({}, {"backend": "processes", "workers": 2}):
        again = train(tmp_path / "a", **changes)
        assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    "kernel,stride,padding,dilation,size",
    [
        (3, 1, 1, 1, (8, 8)),
        (5, 2, 2, 1, (9, 11)),
        (3, 2, 0, 2, (12, 10)),
        (1, 1, 0, 1, (5, 5)),
        ((3, 5), (1, 2), (1, 2), 1, (8, 8)),
    ],
)
def test_convolutions_as_products_agree_with_those_that_keep_their_patches(
    kernel, stride, padding, dilation, size, bias, relu
):
    """The plain form: patches by torch's unfold, kept for the backward pass that autograd makes of them."""
    draw = torch.Generator().manual_seed(0)
    layer = torch.nn.Conv2d(2, 4, kernel, stride, padding, dilation)
    x, weight = torch.randn(5, 6, *size, generator=draw), torch.randn(3, 4, 2, *layer.kernel_size, generator=draw)
    inputs = [x, weight, *([torch.randn(3, 4, generator=draw)] if bias else [])]

    def plain(x, weight, bias=None):
        patches = torch.nn.functional.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        patches = patches.view(5, 3, -1, patches.shape[2])
        out = torch.einsum("koi,bkil->bkol", weight.flatten(2), patches)
        out = out if bias is None else out + bias[None, :, :, None]
        return torch.relu(out) if relu else out

    def ours(x, weight, bias=None):
        return stacked._ConvMatmul.apply(x, weight, bias, layer, relu)

    results = []
    for form in (plain, ours):
        leaves = [value.clone().requires_grad_() for value in inputs]
        out = form(*leaves).reshape(5, 12, -1)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-5)
