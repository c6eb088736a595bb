"""Training: every record reaches one teacher, launches follow from public numbers, interrupted runs are resumed."""

import inspect
import itertools
import math

import pytest
import torch

from pate_torch import networks
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import DataSpec, PrivateRecords
from pate_torch.teachers import engine, ensemble, training
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.training import train
from tests.teachers.teacher_world import differing, recipe, records, shards_of, spec

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def shards(num_teachers, size):
    return shards_of([list(range(k * size, k * size + size)) for k in range(num_teachers)])


def remove(private: PrivateRecords, i: int) -> PrivateRecords:
    rows = torch.arange(len(private)) != i
    return PrivateRecords.from_rows(private.x[rows], private.y[rows], private.unit_id[rows.numpy()])


def replace(private: PrivateRecords, i: int) -> PrivateRecords:
    x, y = private.x.clone(), private.y.clone()
    x[i], y[i] = 255 - x[i], (y[i] + 1) % 4
    return PrivateRecords.from_rows(x, y, private.unit_id)


# ---- one record, one teacher ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["vectorized", "processes"])
@pytest.mark.parametrize("partition,change", [(ReplaceOne(), replace), (AddRemove(), remove)])
def test_one_record_changes_one_teacher_and_no_bit_of_the_others(backend, partition, change):
    private = records(70)
    owner = int((partition.make_shards(private, 7, seed=1).index_KS == 23).any(1).nonzero())
    before, after = (
        train(data, spec(), partition.make_shards(data, 7, seed=1), recipe(backend=backend), seed=3).params
        for data in (private, change(private, 23))
    )
    assert differing(before, after) == {owner}


def test_emptying_a_shard_changes_one_teacher_and_no_bit_of_the_others():
    rows = [[0, 1, 2, 3, 4, 5], [6], [7, 8, 9]]
    full = train(records(10), spec(), shards_of(rows), recipe(), seed=0)
    without = train(records(10), spec(), shards_of([rows[0], [], rows[2]]), recipe(), seed=0)
    assert differing(full.params, without.params) == {1}
    assert without.trained_K.tolist() == [True, False, True]
    assert not without.predict(records(5).x)[1].any()


def test_the_number_of_threads_changes_no_bit_and_is_left_as_it_was():
    private = records(90)
    one = train(private, spec(), shards(7, 12), recipe(), seed=0)
    try:
        torch.set_num_threads(3)
        three = train(private, spec(), shards(7, 12), recipe(), seed=0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert differing(one.params, three.params) == set()


def test_unequal_shards_train_together_for_the_same_steps():
    rows = [[0], [1, 2], list(range(3, 40)), []]
    losses: list[torch.Tensor] = []
    settings = recipe(steps=80, augment=None)
    ensemble = train(
        records(40), spec(), shards_of(rows), settings, seed=0, on_losses=lambda _, loss_K: losses.append(loss_K)
    )
    assert ensemble.trained_K.tolist() == [True, True, True, False]
    assert len(losses) == engine.CURVE_POINTS and all(loss_K.shape == (4,) for loss_K in losses)
    assert (losses[-1][:3] < 0.1).all() and losses[0][0] < math.log(4) + 0.2
    own = records(40)
    for teacher, row in enumerate(rows[:3]):
        index = torch.tensor(row)
        assert (ensemble.predict(own.x[index])[teacher] == own.y[index]).all()


# ---- groups and launches --------------------------------------------------------------------------------------------


def test_no_record_decides_how_many_are_launched():
    """Else one more in the largest shard could change the last bits of every teacher, and votes of all."""
    assert set(inspect.signature(training.compute_launch_size).parameters) == {
        *("recipe", "num_parameters", "spec", "num_teachers", "device")
    }
    assert set(inspect.signature(ensemble.compute_gpu_points).parameters) == {"spec"}


@pytest.mark.parametrize("num_teachers", [1, 16, 17, 50, 250, 10_000])
@pytest.mark.parametrize("ranks", [1, 3, 8, 64])
def test_every_teacher_is_dealt_once_and_no_rank_has_two_groups_more(num_teachers, ranks):
    groups = training.split_groups(num_teachers)
    assert list(itertools.chain(*groups)) == list(range(num_teachers))
    assert all(len(group) == training.GROUP_TEACHERS == 16 for group in groups[:-1])
    owners = training.assign_owners(len(groups), ranks)
    assert owners == sorted(owners) and max(owners) < ranks
    loads = [owners.count(rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("size", [1, 10, 15, 16, 17, 40, 250])
def test_launches_cover_what_is_to_be_done_and_nothing_else(size):
    groups = training.split_groups(250)
    for pending in (groups, groups[3:7], [groups[0], groups[2], groups[3], groups[15]], []):
        launches = training.plan_launches(pending, size)
        assert sorted(itertools.chain(*launches)) == sorted(itertools.chain(*pending))
        assert all(len(teachers) <= max(1, size if size < 16 else size - size % 16) for teachers in launches)
        if size < 16:  # within a group: what else is to be done changes nothing
            assert all(teachers.start // 16 == (teachers.stop - 1) // 16 for teachers in launches)


def compute_size(recipe, spec, num_teachers, device):
    module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    return training.compute_launch_size(recipe, networks.count_parameters(module), spec, num_teachers, device)


def test_a_launch_on_a_cpu_is_a_group_at_most():
    for network, teachers in itertools.product(("logistic", "lean_cnn", "convnet"), (1, 250, 5000)):
        assert 1 <= compute_size(TeacherRecipe(network=network), spec(), teachers, CPU) <= 16
    assert compute_size(TeacherRecipe(chunk=12), spec(), 250, CPU) == 12
    assert compute_size(TeacherRecipe(chunk=64), spec(), 250, CPU) == 16


def test_a_gpu_gets_whole_groups_or_a_few_teachers_on_large_images():
    def images(size, channels=3):
        names, half = tuple(map(str, range(10))), (0.5,) * channels
        shape = (channels, size, size)
        return DataSpec(name="images", num_classes=10, input_shape=shape, class_names=names, mean=half, std=half)

    convnet = TeacherRecipe(network="convnet")
    sizes = {pixels: compute_size(convnet, images(pixels), 10_000, GPU) for pixels in (28, 32, 64, 224)}
    assert sizes == {28: 160, 32: 128, 64: 32, 224: 2}  # 18 GiB of activations each
    assert compute_size(TeacherRecipe(batch_size=10**6), images(32), 250, GPU) == 1
    assert compute_size(TeacherRecipe(chunk=200), images(32), 10_000, GPU) == 200
    size = compute_size(TeacherRecipe(network="logistic"), images(1, channels=1), 250, GPU)
    assert training.plan_launches(training.split_groups(250), size) == [range(250)]  # the last group is not whole
    assert [ensemble.compute_gpu_points(images(pixels)) for pixels in (1, 32, 64, 224, 10_000)] == [512, 256, 64, 5, 1]


# ---- interrupted runs, progress, refusals ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["vectorized", "processes"])
def test_resumes_from_finished_groups_to_the_same_bits(tmp_path, backend, monkeypatch):
    """Groups that one way of running has finished are taken up by every other."""
    private = records(120)
    settings = recipe(network="logistic", options={}, augment=None, backend=backend, steps=4, chunk=8)
    whole = train(private, spec(), shards(40, 3), settings, seed=0)

    def interrupt(done: int, _: int) -> None:
        if done >= 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(private, spec(), shards(40, 3), settings, seed=0, checkpoint_dir=tmp_path, progress=interrupt)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    trained: list[range] = []
    train_stacked = training.train_stacked

    def train_and_count(chunk, *arguments):
        trained.append(chunk.teachers)
        return train_stacked(chunk, *arguments)

    def resume(data, seed=0):
        trained.clear()
        other = TeacherRecipe(**{**settings.__dict__, "backend": "vectorized"})
        return train(data, spec(), shards(40, 3), other, seed=seed, checkpoint_dir=tmp_path)

    monkeypatch.setattr(training, "train_stacked", train_and_count)
    assert differing(whole.params, resume(private).params) == set() and trained == [range(32, 40)]
    resume(private, seed=1)
    assert len(trained) == 5
    files[0].write_bytes(b"damaged")
    resume(replace(private, 61))
    assert trained == [range(0, 8), range(8, 16), range(16, 24), range(24, 32)]


def test_progress_and_curves_are_reported():
    seen, tags = [], []
    train(
        records(60),
        spec(),
        shards(6, 10),
        recipe(steps=4),
        seed=0,
        progress=lambda done, total: seen.append((done, total)),
        log=lambda tag, value, step: tags.append((tag, step, math.isfinite(value))),
    )
    done = [count for count, total in seen if total == 6]
    assert len(done) == len(seen) and done == sorted(done) and {3, 6} <= set(done)
    assert 0 < min(filter(None, done)) < 3  # reported before the first launch ends
    assert ("teachers/loss_mean", 4, True) in tags and ("teachers/accuracy_mean", 1, True) in tags


def test_the_owner_is_warned_of_teachers_that_all_diverged_and_the_run_goes_on():
    """A single unit can make the last teacher of a small ensemble diverge, so nothing may be refused for it."""
    with pytest.warns(UserWarning, match=r"teacher\.learning_rate=1e\+30: all teachers diverged.*Lower teacher"):
        ensemble = train(records(60), spec(), shards(6, 10), recipe(learning_rate=1e30, steps=10), seed=0)
    assert not ensemble.predict(records(60).x).any()  # each of them still has one vote, for class 0
    loss = torch.full((6, 5), math.nan)
    loss[3] = 1.0
    training._warn_if_diverged(loss, recipe())


def test_teachers_that_do_not_fit_into_a_gpu_name_the_key(monkeypatch):
    def exhaust(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(training, "train_stacked", exhaust)
    with pytest.raises(ValueError, match=r"teacher\.chunk=3: 2 teachers at once do not fit"):
        train(records(9), spec(), shards(2, 2), recipe(), seed=0)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"network": "resnet", "options": {"norm": "batch"}}, "batch normalization"),
        ({"options": {"width": 3}}, "takes channels, hidden"),
        ({"steps": 0}, "steps"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"schedule": "linear"}, "schedule"),
        ({"backend": "threads"}, "backend"),
        ({"dtype": "half"}, "dtype"),
        ({"augment": {"rotate": 400}}, "augment.rotate"),
        ({"augment": 3}, "augment"),
        ({"label_smoothing": 0.9}, "label_smoothing"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        train(records(9), spec(), shards(2, 2), recipe(**changes), seed=0)
