"""Training: every record reaches one teacher, launches follow from public numbers, interrupted runs are resumed."""

import dataclasses
import inspect
import itertools
import math

import pytest
import torch

from pate_torch import networks
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import PrivateRecords
from pate_torch.teachers import engine, ensemble, training
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.training import train
from tests.teachers.teacher_world import differing, even_shards, execution, recipe, records, shards_of, spec

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def remove(private, i):
    rows = torch.arange(len(private)) != i
    return PrivateRecords.from_rows(private.x[rows], private.y[rows], private.unit_id[rows.numpy()])


def replace(private, i):
    x, y = private.x.clone(), private.y.clone()
    x[i], y[i] = 255 - x[i], (y[i] + 1) % 4
    return PrivateRecords.from_rows(x, y, private.unit_id)


@pytest.mark.parametrize("backend", ["vectorized", "processes"])
@pytest.mark.parametrize("partition,change", [(ReplaceOne(), replace), (AddRemove(), remove)])
def test_one_record_changes_one_teacher_and_no_bit_of_the_others(backend, partition, change):
    private = records(70)
    owner = int((partition.make_shards(private, 7, seed=1).index_KS == 23).any(1).nonzero())
    settings = {"seed": 3, "execution": execution(backend=backend, workers=2)}
    before, after = (
        train(data, spec(), partition.make_shards(data, 7, seed=1), recipe(), **settings).params
        for data in (private, change(private, 23))
    )
    assert differing(before, after) == {owner}


def test_emptying_a_shard_changes_one_teacher_and_no_bit_of_the_others():
    full, without = (
        train(
            records(10),
            spec(),
            shards_of([[0, 1, 2, 3, 4, 5], rows, [7, 8, 9]]),
            recipe(),
            seed=0,
            execution=execution(),
        )
        for rows in ([6], [])
    )
    assert differing(full.params, without.params) == {1}
    assert without.trained_K.tolist() == [True, False, True]
    assert not without.predict(records(5).x)[1].any()


def test_the_number_of_threads_changes_no_bit_and_is_left_as_it_was():
    private = records(90)
    one = train(private, spec(), even_shards(7, 12), recipe(), seed=0, execution=execution())
    try:
        torch.set_num_threads(3)
        three = train(private, spec(), even_shards(7, 12), recipe(), seed=0, execution=execution())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert differing(one.params, three.params) == set()


def test_unequal_shards_train_together_for_the_same_steps():
    own, rows, losses = records(40), [[0], [1, 2], list(range(3, 40)), []], []
    settings = recipe(steps=80, augment=None)
    trained = train(own, spec(), shards_of(rows), settings, seed=0, on_losses=lambda _, loss_K: losses.append(loss_K))
    assert trained.trained_K.tolist() == [True, True, True, False]
    assert len(losses) == engine.CURVE_POINTS and all(loss_K.shape == (4,) for loss_K in losses)
    assert (losses[-1][:3] < 0.1).all() and losses[0][0] < math.log(4) + 0.2
    for teacher, row in enumerate(rows[:3]):
        assert (trained.predict(own.x[row])[teacher] == own.y[row]).all()


def test_no_record_decides_how_many_are_launched():
    """Else one more record in the largest shard could change the last bits of every teacher, and votes of all."""
    public = {"recipe", "num_parameters", "spec", "num_teachers", "device"}
    assert set(inspect.signature(training.compute_launch_size).parameters) == public
    assert set(inspect.signature(ensemble.compute_gpu_points).parameters) == {"spec"}


@pytest.mark.parametrize("num_teachers", [1, 16, 17, 50, 250, 10_000])
@pytest.mark.parametrize("ranks", [1, 3, 8, 64])
def test_no_rank_has_two_groups_more_than_another_and_no_group_has_two_ranks(num_teachers, ranks):
    groups, owners = training.split_groups(num_teachers), training.get_owners(num_teachers, ranks)
    assert list(itertools.chain(*groups)) == list(range(num_teachers)) and len(owners) == num_teachers
    assert all(len(group) == training.GROUP_TEACHERS == 16 for group in groups[:-1])
    assert all(len({owners[k] for k in group}) == 1 for group in groups)
    assert owners == sorted(owners) and max(owners) < ranks
    loads = [sum(owners[group.start] == rank for group in groups) for rank in range(ranks)]
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("size", [1, 10, 15, 16, 17, 40, 250])
def test_launches_cover_the_pending_teachers_and_no_others(size):
    groups = training.split_groups(250)
    for pending in (groups, groups[3:7], [groups[0], groups[2], groups[3], groups[15]], []):
        launches = training.plan_launches(pending, size)
        assert sorted(itertools.chain(*launches)) == sorted(itertools.chain(*pending))
        assert all(len(teachers) <= max(1, size if size < 16 else size - size % 16) for teachers in launches)
        if size < 16:  # within a group: other pending groups change nothing
            assert all(teachers.start // 16 == (teachers.stop - 1) // 16 for teachers in launches)


def compute_size(settings, points, num_teachers, device):
    with torch.device("meta"):  # counts the parameters, and draws none
        module = networks.build(settings.network, points.input_shape, points.num_classes, **settings.options)
    return training.compute_launch_size(settings, networks.count_parameters(module), points, num_teachers, device)


def test_a_launch_on_a_cpu_is_a_group_at_most():
    for network, teachers in itertools.product(("logistic", "lean_cnn", "convnet"), (1, 250, 5000)):
        assert 1 <= compute_size(TeacherRecipe(network=network), spec(), teachers, CPU) <= 16


@pytest.mark.parametrize("chunk,launches", [(12, [12, 4, 12, 4, 3]), (64, [16, 16, 3])])
def test_a_chunk_is_a_part_of_a_group_on_a_cpu(chunk, launches, monkeypatch):
    trained, train_stacked = [], training.train_stacked
    monkeypatch.setattr(
        training, "train_stacked", lambda one, *given: trained.append(len(one)) or train_stacked(one, *given)
    )
    settings = recipe(network="logistic", options={}, augment=None, steps=1)
    train(records(70), spec(), even_shards(35, 2), settings, seed=0, execution=execution(chunk=chunk))
    assert trained == launches


def test_a_gpu_gets_whole_groups_or_a_few_teachers_on_large_images():
    def images(size, channels=3):
        half = (0.5,) * channels
        return dataclasses.replace(spec(10), input_shape=(channels, size, size), mean=half, std=half)

    convnet = TeacherRecipe(network="convnet")
    sizes = {pixels: compute_size(convnet, images(pixels), 10_000, GPU) for pixels in (28, 32, 64, 224)}
    assert sizes == {28: 160, 32: 128, 64: 32, 224: 2}  # 18 GiB of activations each
    assert compute_size(TeacherRecipe(batch_size=10**6), images(32), 250, GPU) == 1
    size = compute_size(TeacherRecipe(network="logistic"), images(1, channels=1), 250, GPU)
    assert training.plan_launches(training.split_groups(250), size) == [range(250)]  # the last group is not whole
    assert [ensemble.compute_gpu_points(images(pixels)) for pixels in (1, 32, 64, 224, 10_000)] == [512, 256, 64, 5, 1]


@pytest.mark.parametrize("backend", ["vectorized", "processes"])
def test_resumes_from_finished_groups_to_the_same_bits(tmp_path, backend, monkeypatch):
    """Either backend continues from the groups that the other has finished in launches of the same size."""
    private, layout = records(120), even_shards(40, 3)
    settings = recipe(network="logistic", options={}, augment=None, steps=4)
    first = execution(backend=backend, chunk=8)
    whole = train(private, spec(), layout, settings, seed=0, execution=first)

    def interrupt(done, _):
        if done >= 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(private, spec(), layout, settings, seed=0, execution=first, checkpoint_dir=tmp_path, progress=interrupt)
    files, trained = sorted(tmp_path.glob("*.safetensors")), []
    assert len(files) == 2
    train_stacked = training.train_stacked

    def train_and_note(chunk, *arguments):
        trained.append(chunk.teachers)
        return train_stacked(chunk, *arguments)

    monkeypatch.setattr(training, "train_stacked", train_and_note)

    def resume(data, seed=0, chunk=8):
        trained.clear()
        other = execution(chunk=chunk)
        return train(data, spec(), layout, settings, seed=seed, execution=other, checkpoint_dir=tmp_path).params

    assert differing(whole.params, resume(private)) == set() and trained == [range(32, 40)]
    resume(private, seed=1)
    assert len(trained) == 5
    resume(private, chunk=4)  # else the second training of one teacher could round otherwise than the first
    assert len(trained) == 10
    files[0].write_bytes(b"damaged")
    resume(replace(private, 61))
    assert trained == [range(0, 8), range(8, 16), range(16, 24), range(24, 32)]


def test_progress_and_curves_are_reported():
    seen, tags = [], []
    train(
        records(60), spec(), even_shards(6, 10), recipe(steps=4), seed=0, execution=execution(),
        progress=lambda done, total: seen.append((done, total)),
        log=lambda tag, value, step: tags.append((tag, step, math.isfinite(value))),
    )  # fmt: skip
    done = [count for count, total in seen if total == 6]
    assert len(done) == len(seen) and done == sorted(done) and {3, 6} <= set(done)
    assert 0 < min(filter(None, done)) < 3  # reported before the first launch ends
    assert ("teachers/loss_mean", 4, True) in tags and ("teachers/accuracy_mean", 1, True) in tags


def test_a_teacher_alone_counts_by_its_steps():
    """Else the model without privacy would show nothing until it is done."""
    seen = []
    train(records(9), spec(), even_shards(1, 9), recipe(steps=4), seed=0, progress=lambda *counts: seen.append(counts))
    assert seen == [(done, 4) for done in range(5)]


def test_the_owner_is_warned_of_teachers_that_all_diverged_and_the_run_goes_on():
    """A single unit can make the last teacher of a small ensemble diverge, so nothing may be refused for it."""
    with pytest.warns(UserWarning, match=r"teacher\.learning_rate=1e\+30: all teachers diverged.*Lower teacher"):
        diverged = train(records(60), spec(), even_shards(6, 10), recipe(learning_rate=1e30, steps=10), seed=0)
    assert not diverged.predict(records(60).x).any()  # each of them still has one vote, for class 0
    curves = {name: torch.full((6, 5), math.nan) for name in engine.CURVES}
    curves["curve.loss"][3] = 1.0
    training._report_curves(curves, recipe(), lambda *_: None, lambda *_: None)


def test_teachers_that_do_not_fit_into_a_gpu_name_the_key(monkeypatch):
    def exhaust(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(training, "train_stacked", exhaust)
    with pytest.raises(ValueError, match=r"execution\.chunk=3: 2 teachers at once"):
        train(records(9), spec(), even_shards(2, 2), recipe(), seed=0, execution=execution())


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"network": "resnet", "options": {"norm": "batch"}}, "batch normalization"),
        ({"options": {"width": 3}}, "takes channels, hidden"),
    ],
)
def test_networks_that_cannot_be_teachers_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        train(records(9), spec(), even_shards(2, 2), recipe(**changes), seed=0)
