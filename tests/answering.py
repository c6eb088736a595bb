"""A release of votes that are here already, in the order of a session: check, reserve, draw, write, commit."""

from pate_torch.methods.labeling import PreparedLabeling


def answer_queries(*, sensitive, pool, spec, mechanism, strategy, budget, num_queries, seed=0, write=None):
    """The answers of a release that is charged to ``budget``."""
    prepared = PreparedLabeling(
        sensitive=sensitive, spec=spec, mechanism=mechanism, query=strategy, num_queries=num_queries, seed=seed
    )
    rounds = min(strategy.rounds, num_queries)
    prepared.check(budget, pool)
    with budget.spend(mechanism.privacy_events(num_queries, rounds), mechanism=mechanism.name) as spending:
        release = prepared.release(pool, spending)
        if write is not None:
            spending.record_files(write(release))
    return release
