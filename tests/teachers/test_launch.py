"""How teachers are dealt and launched: by groups of 16, within a GPU's memory, from public numbers alone."""

import inspect
import itertools

import pytest
import torch

from pate_torch.privacy.records import DataSpec
from pate_torch.teachers import launch, stacked, training
from pate_torch.teachers.recipe import TeacherRecipe
from tests.teachers.teacher_world import records, shards_of, spec

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def images(size=32, channels=3, classes=10):
    names = tuple(map(str, range(classes)))
    half = (0.5,) * channels
    return DataSpec(
        name="images", num_classes=classes, input_shape=(channels, size, size), class_names=names, mean=half, std=half
    )


def train_size(recipe, spec, num_teachers, device):
    return launch.compute_train_size(
        recipe, launch.compute_network_cost(recipe.network, recipe.options, spec), num_teachers, device
    )


def test_no_record_decides_how_many_are_launched():
    """Else one more in the largest shard could change the last bits of every teacher, and votes of all."""
    assert set(inspect.signature(launch.compute_train_size).parameters) == {"recipe", "cost", "num_teachers", "device"}
    assert set(inspect.signature(launch.estimate_training_bytes).parameters) == {"recipe", "cost"}


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


def test_a_gpu_gets_what_its_memory_holds_in_whole_groups():
    recipe = TeacherRecipe(network="convnet", options={})
    cost = launch.compute_network_cost("convnet", {}, images())
    each = launch.estimate_training_bytes(recipe, cost)
    size = train_size(recipe, images(), 10_000, GPU)
    assert size % 16 == 0 and size * each <= 20 * 2**30 < (size + 16) * each
    assert train_size(recipe, images(), 250, GPU) == 144 and 250 * each < 80e9  # two launches in 24 GiB
    wide = TeacherRecipe(network="logistic", options={})
    for teachers in (75, 250):  # the last group is not whole, and belongs to the launch all the same
        every = launch.plan_launches(launch.split_groups(teachers), train_size(wide, images(), teachers, GPU))
        assert every == [range(teachers)]
    small = TeacherRecipe(network="convnet", options={}, memory_gib=3.5 * each / 2**30)
    assert train_size(small, images(), 250, GPU) == 3


def test_too_little_memory_is_said_with_the_key():
    recipe = TeacherRecipe(network="convnet", options={}, memory_gib=0.001)
    with pytest.raises(ValueError, match=r"memory_gib=0\.001: is too little: .*network=convnet.*batch_size=32"):
        train_size(recipe, images(), 250, GPU)
    with pytest.raises(ValueError, match=r"teacher\.memory_gib=1e-06: is too little"):
        launch.compute_query_size(launch.compute_network_cost("convnet", {}, images()), 250, 1e-6)


@pytest.mark.parametrize("network", ["logistic", "mlp", "lean_cnn", "convnet", "resnet"])
@pytest.mark.parametrize("size", [28, 64])
def test_asking_keeps_within_the_memory(network, size):
    cost = launch.compute_network_cost(network, {}, images(size))
    for memory in (0.1, 1.0, 20.0):
        teachers, points = launch.compute_query_size(cost, 250, memory)
        assert teachers * launch.estimate_query_bytes(cost, points) <= memory * 2**30
        assert teachers == 64 or 2 * teachers * launch.estimate_query_bytes(cost, points) > memory * 2**30


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
