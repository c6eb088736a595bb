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
from tests.teachers.teacher_world import differing, even_shards, processes, recipe, records, shards_of, spec

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def remove(private, i):
    rows = torch.arange(len(private)) != i
    return PrivateRecords.from_rows(private.x[rows], private.y[rows], private.unit_id[rows.numpy()])


def replace(private, i):
    x, y = private.x.clone(), private.y.clone()
    x[i], y[i] = 255 - x[i], (y[i] + 1) % 4
    return PrivateRecords.from_rows(x, y, private.unit_id)


@pytest.mark.parametrize("partition,change,workers", [(ReplaceOne(), replace, 1), (AddRemove(), remove, 2)])
def test_one_record_changes_one_teacher_and_no_bit_of_the_others(workers, partition, change, tmp_path):
    private = records(70)
    owner = int((partition.make_shards(private, 7, seed=1).index_KS == 23).any(1).nonzero())
    settings = {"seed": 3, "executor": processes(workers), "folder": tmp_path}  # files of other records are not used
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
            executor=processes(),
        )
        for rows in ([6], [])
    )
    assert differing(full.params, without.params) == {1}
    assert without.trained_K.tolist() == [True, False, True]
    assert not without.predict(records(5).x)[1].any()


def test_the_number_of_threads_changes_no_bit_and_is_left_as_it_was():
    private = records(90)
    settings = recipe(steps=4)
    one = train(private, spec(), even_shards(7, 12), settings, seed=0, executor=processes())
    try:
        torch.set_num_threads(3)
        three = train(private, spec(), even_shards(7, 12), settings, seed=0, executor=processes())
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
    assert set(inspect.signature(training.split_groups).parameters) == {"num_teachers", "num_workers", "largest"}
    public = {"recipe", "num_parameters", "spec", "num_teachers", "device"}
    assert set(inspect.signature(training.compute_launch_size).parameters) == public
    assert set(inspect.signature(ensemble.compute_gpu_points).parameters) == {"spec"}


@pytest.mark.parametrize("num_teachers", [1, 16, 17, 50, 250, 10_000])
@pytest.mark.parametrize("workers", [1, 3, 8, 64])
def test_groups_cover_the_teachers_and_keep_all_workers_busy(num_teachers, workers):
    groups = training.split_groups(num_teachers, workers, 16)
    assert list(itertools.chain(*groups)) == list(range(num_teachers)) and len(groups[0]) <= 16
    assert all(len(group) == len(groups[0]) for group in groups[:-1])
    loads = [sum(map(len, groups[worker::workers])) for worker in range(workers)]
    if workers > 1:
        mean = num_teachers / workers
        assert mean / max(loads) >= min(0.85, mean / math.ceil(mean))


def compute_size(settings, points, num_teachers, device):
    with torch.device("meta"):  # counts the parameters, and draws none
        module = networks.build(settings.network, points.input_shape, points.num_classes, **settings.options)
    return training.compute_launch_size(settings, networks.count_parameters(module), points, num_teachers, device)


def test_a_launch_on_a_cpu_is_a_group_at_most():
    for network, teachers in itertools.product(("logistic", "lean_cnn", "convnet"), (1, 250, 5000)):
        assert 1 <= compute_size(TeacherRecipe(network=network), spec(), teachers, CPU) <= 16


@pytest.mark.parametrize("chunk,launches", [(12, [12, 4, 12, 4, 3]), (64, [16, 16, 3])])
def test_a_chunk_is_a_part_of_a_group_on_a_cpu(chunk, launches, monkeypatch):
    trained, train_stacked = [], engine.train_stacked
    monkeypatch.setattr(
        engine, "train_stacked", lambda one, *given: trained.append(len(one)) or train_stacked(one, *given)
    )
    settings = recipe(network="logistic", options={}, augment=None, steps=1)
    train(records(70), spec(), even_shards(35, 2), settings, seed=0, executor=processes(chunk=chunk))
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
    assert training.split_groups(250, 1, size) == [range(250)]
    assert [ensemble.compute_gpu_points(images(pixels)) for pixels in (1, 32, 64, 224, 10_000)] == [512, 256, 64, 5, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_resumes_from_finished_groups_to_the_same_bits(tmp_path, workers, monkeypatch):
    private, layout = records(120), even_shards(40, 3)
    settings = recipe(network="logistic", options={}, augment=None, steps=4)
    whole = train(private, spec(), layout, settings, seed=0, executor=processes(chunk=8))

    def interrupt(done, _):
        if done > 20:  # more than two groups of ten have begun, so that one is finished
            raise KeyboardInterrupt

    first = {"executor": processes(workers, chunk=8), "folder": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        train(private, spec(), layout, settings, seed=0, progress=interrupt, **first)
    finished = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("teachers_*.safetensors")}
    groups = training.split_groups(40, workers, 16)
    assert len(finished) > 0 and (workers > 1 or len(finished) < len(groups))

    def resume(data, seed=0, chunk=8):
        executor = processes(workers, chunk)
        ensemble = train(data, spec(), layout, settings, seed=seed, executor=executor, folder=tmp_path)
        times = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("teachers_*.safetensors")}
        kept = {name for name, time in finished.items() if times[name] == time}
        finished.update(times)
        return ensemble.params, len(kept)

    names = set(finished)
    params, num_kept = resume(private)
    assert differing(whole.params, params) == set() and num_kept == len(names)
    assert resume(private)[1] == len(groups)
    resume(private, seed=1)
    resume(private, chunk=4)  # else the second training of one teacher could round otherwise than the first
    assert len(finished) == 3 * len(groups)
    damaged, other_record = sorted(name for name in finished if name in names)[0], 61
    (tmp_path / damaged).write_bytes(b"damaged")
    params, num_kept = resume(replace(private, other_record))
    assert num_kept == 3 * len(groups) - 2  # a damaged file and one of another record are not used
    assert differing(whole.params, params) == {other_record // 3}


def test_progress_and_curves_are_reported():
    seen, tags = [], []
    train(
        records(60), spec(), even_shards(6, 10), recipe(steps=4), seed=0, executor=processes(),
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

    monkeypatch.setattr(engine, "train_stacked", exhaust)
    with pytest.raises(ValueError, match=r"executor\.chunk=3: 2 teachers at once"):
        train(records(9), spec(), even_shards(2, 2), recipe(), seed=0, executor=processes())


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
