"""release/tensorboard, read back: the right tags and figures, no machine's name, and no price without privacy."""

import socket
from datetime import datetime, time

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from pate_torch.release.release_writer import ReleaseWriter
from tests.reporting.reporting_demo import EPSILON, confusion, demo


def written(folder, report, log=()):
    with ReleaseWriter(folder, private=report.private) as board:
        for row in log:
            board.log(*row)
        board.write(report)
    return EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = tmp_path_factory.mktemp("board")
    return folder, written(folder, demo())


def test_the_tags_are_there(board):
    tags = board[1].Tags()
    assert set(tags["scalars"]) == {"student/loss", "student/confident_share"}
    expected = {
        "privacy/epsilon",
        "privacy/epsilon_all_releases",
        "privacy/budget_left",
        "privacy_statement/text_summary",
    }
    assert expected <= set(tags["tensors"])
    assert {"student_test/confusion", "labels/answered"} <= set(tags["images"])
    assert "custom_scalars__config__" in tags["tensors"]
    assert "hparams" in board[1].summary_metadata["_hparams_/session_start_info"].plugin_data.plugin_name


def test_many_classes_are_not_drawn(tmp_path):
    many = written(tmp_path, demo(confusion=confusion(classes=30), class_names=tuple(map(str, range(30)))))
    assert "student_test/confusion" not in many.Tags()["images"]


def test_epsilon_grows_to_the_guarantee_and_carries_its_terms(board):
    read = board[1]
    last = read.Tensors("privacy/epsilon")[-1]
    assert last.step == 286 and last.tensor_proto.double_val[0] == EPSILON  # double precision, unrounded
    left = read.Tensors("privacy/budget_left")[-1].tensor_proto.double_val[0]
    assert left == pytest.approx(4.0 - demo().epsilon_charged)
    for tag in ("privacy/epsilon", "privacy/budget_left"):
        terms = read.summary_metadata[tag].summary_description
        assert all(term in terms for term in ("1e-5", "add_remove", "record", "(gdp)"))


def row(read):
    """A run's row in the table of runs."""
    content = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    given = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: value.number_value or value.string_value or value.bool_value for name, value in given.items()}


def test_single_numbers_stand_in_the_table_of_runs_beside_their_terms(board):
    numbers, report = row(board[1]), demo()
    assert numbers["epsilon"] == EPSILON and numbers["epsilon_terms"] == report.terms
    assert numbers["accuracy_student"] == report.student_accuracy
    assert numbers["total_left"] == pytest.approx(4.0 - report.epsilon_charged)
    assert list(sorted(numbers))[:5] == ["accuracy_labels", "accuracy_student", "dataset", "epsilon", "epsilon_terms"]


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon_curve": (), "account_curve": ()},
        {"queries_asked": 1, "queries_answered": 1, "epsilon_curve": (2.4,), "account_curve": (2.9,)},
    ],
    ids=["the end alone is known", "one question"],
)
def test_no_curve_has_a_single_point(changes, tmp_path):
    read = written(tmp_path, demo(**changes, student_curves={"student/loss": ((0, 0.25),)}))
    assert read.Tags()["scalars"] == [] and not any("privacy/" in tag for tag in read.Tags()["tensors"])
    assert row(read)["student/loss"] == 0.25 and row(read)["total_left"] > 0


def test_a_run_cut_off_after_one_point_keeps_it(tmp_path):
    with ReleaseWriter(tmp_path, private=True) as board:
        board.log("student/loss", 0.5, 3)
    assert [e.value for e in EventAccumulator(str(tmp_path)).Reload().Scalars("student/loss")] == [0.5]


def test_the_statement_is_a_page_of_text(board):
    words = board[1].Tensors("privacy_statement/text_summary")[0].tensor_proto.string_val[0].decode()
    assert all(term in words for term in ("epsilon = 2.436", "1e-5", "one record", "(gdp)", "does not cover"))


def test_file_names_hold_no_machines_name(board):
    names = [file.name for file in board[0].iterdir()]
    assert names and all(socket.gethostname() not in name for name in names)
    assert all(name.startswith("events.out.tfevents.") for name in names)


def test_a_second_board_in_the_same_folder_loses_nothing(tmp_path):
    for step in (1, 2):
        with ReleaseWriter(tmp_path, private=True) as board:
            board.log("student/loss", 1.0, step)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in read.Scalars("student/loss")] == [1, 2]


def test_curves_logged_live_are_not_written_twice(tmp_path):
    read = written(tmp_path, demo(), log=[("student/loss", 9.0, 0), ("student/loss", 8.0, 1)])
    assert [e.value for e in read.Scalars("student/loss")] == [9.0, 8.0]


def test_a_board_refuses_what_is_not_the_students(tmp_path):
    with ReleaseWriter(tmp_path, private=True) as board, pytest.raises(ValueError, match="student/"):
        board.log("teachers/loss_mean", 1.0, 0)


def test_a_board_must_be_opened_as_what_the_report_is(tmp_path):
    with ReleaseWriter(tmp_path, private=True) as board, pytest.raises(ValueError, match="private"):
        board.write(demo(private=False))


def test_every_tag_of_a_run_that_is_not_private_says_so_and_no_price_is_shown(tmp_path):
    read = written(tmp_path, demo(private=False))
    tags = [tag for kind in ("scalars", "tensors", "images", "histograms") for tag in read.Tags()[kind]]
    own = [tag for tag in tags if tag != "custom_scalars__config__" and not tag.startswith("_hparams_")]
    assert own and all(tag.startswith("NOT_PRIVATE/") for tag in own)
    assert not any("epsilon" in tag or "privacy/" in tag for tag in own)
    assert not any("epsilon" in name or "total" in name for name in row(read)) and row(read)["private"] is False
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"2.436" not in content and b"NOT PRIVATE" in content
    assert np.float64(EPSILON).tobytes() not in content and np.float32(EPSILON).tobytes() not in content


def test_no_event_tells_when_it_was_written(board):
    """The time between two of them may follow from private records: of the day alone something is said."""
    folder, _ = board
    files = sorted(folder.glob("events.out.tfevents.*"))
    events = [event for file in files for event in EventFileLoader(str(file)).Load()]
    assert len(events) > 10 and len({event.wall_time for event in events}) == 1
    assert datetime.fromtimestamp(events[0].wall_time).time() == time()
