"""RunConfig from flat keywords: what belongs to the account's terms, and to the teachers, finds its place."""

import dataclasses

from pate_torch.config import PrivacyConfig, RunConfig
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.votes_file import VotesFile

PRIVACY = {field.name for field in dataclasses.fields(PrivacyConfig)}


def run_config(**given) -> RunConfig:
    """``num_teachers`` makes teachers, where no ``voters`` are given."""
    terms = {key: given.pop(key) for key in PRIVACY & given.keys()}
    if "num_teachers" in given:
        given["method"] = TeacherVotes(num_teachers=given.pop("num_teachers"))
    return RunConfig(**{"baseline": True, **given}, privacy=PrivacyConfig(**terms))


def changed(config: RunConfig, **changes) -> RunConfig:
    """``teachers``: the id of an ensemble to use again; ``votes``: a file of votes that takes their place."""
    terms = {key: changes.pop(key) for key in PRIVACY & changes.keys()}
    voters = {key: changes.pop(key) for key in ("num_teachers", "teachers") if key in changes}
    if "teachers" in voters:
        voters["teachers_id"] = voters.pop("teachers")
    if voters:
        changes["method"] = dataclasses.replace(changes.get("method", config.method), **voters)
    if "votes" in changes:
        path = changes.pop("votes")
        changes["method"] = VotesFile(path=path)
        changes.setdefault("baseline", False)
    return dataclasses.replace(config, **changes, privacy=dataclasses.replace(config.privacy, **terms))
