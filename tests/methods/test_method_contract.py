"""What every method must say for itself, and which mechanism it goes with: a wrong pair cannot be built."""

import inspect
from functools import partial

import pytest
from hydra.utils import get_class

from pate_torch.mechanisms.base import RecordMechanism, VoteMechanism
from pate_torch.methods.base import PrivateMethod
from pate_torch.methods.dpsgd import DPSGD
from pate_torch.methods.gradients import GradientMethod
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.methods.reverse_knn import ReverseKnn
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.methods.voting import VotesFile, VotingMethod
from tests.configurations import list_options, load_option
from tests.mechanisms.mechanism_forms import ALL, made

NAMED = {name: get_class(load_option("method", name)["_target_"]) for name in list_options("method")}
"""The class behind every choice of ``method``."""
TAKES = {
    "gradients": ("gradient_descent",),
    "reverse_knn": ("histogram",),
    "teachers": tuple(name for name in ALL if name not in ("gradient_descent", "histogram")),
}
MAKE = {
    "gradients": partial(GradientMethod, size=100),
    "reverse_knn": ReverseKnn,
    "teachers": partial(TeacherVotes, num_teachers=20),
    "teachers_transductive": partial(TransductiveTeacherVotes, num_teachers=20),
    "votes_file": VotesFile,
}


def test_every_method_is_one_of_these():
    assert set(NAMED) | {"votes_file"} == set(MAKE) | {"dpsgd"} and NAMED["dpsgd"] is DPSGD
    assert all(issubclass(kind, PrivateMethod) and not inspect.isabstract(kind) for kind in NAMED.values())
    assert all(name == kind.name for name, kind in NAMED.items())


@pytest.mark.parametrize("mechanism", ALL)
@pytest.mark.parametrize("method", MAKE)
def test_a_pair_is_built_where_the_mechanism_opens_what_the_method_gives_and_refused_elsewhere(method, mechanism):
    opens = made(mechanism, "torch")
    if mechanism in TAKES.get(method, TAKES["teachers"]):
        pair = MAKE[method](mechanism=opens)
        assert pair.mechanism == opens and pair.noise == opens.noise == "torch" and pair.mechanism_name == mechanism
        assert isinstance(opens, VoteMechanism if isinstance(pair, VotingMethod) else RecordMechanism)
        return
    with pytest.raises(ValueError, match=rf"method='?{method}"):
        MAKE[method](mechanism=opens)


@pytest.mark.parametrize("method", MAKE)
def test_a_method_has_no_mechanism_by_default(method):
    """The price is a choice: nobody's noise is filled in."""
    with pytest.raises(TypeError, match="mechanism"):
        MAKE[method]()


ABSTRACT = ("mechanism_name", "noise", "validate", "privacy_events", "to_record", "prepare")


def test_what_a_method_leaves_unsaid_keeps_it_from_being_built():
    members = {name: vars(DPSGD)[name] for name in ABSTRACT}
    assert type("Whole", (PrivateMethod,), members)().noise == "torch"
    for missing in ABSTRACT:
        rest = {name: member for name, member in members.items() if name != missing}
        with pytest.raises(TypeError, match=f"abstract.*{missing}"):
            type("Partial", (PrivateMethod,), rest)()
    assert LabelingMethod.__abstractmethods__ == {"describe", "prepare"}
    for missing in ("describe", "prepare"):
        rest = {name: vars(ReverseKnn).get(name, lambda *_: None) for name in {"describe", "prepare"} - {missing}}
        with pytest.raises(TypeError, match=f"abstract.*{missing}"):
            type("Partial", (VotingMethod,), rest)(mechanism=made("gaussian", "torch"))
