"""Give up a part of the private records as public points, where no public points come from elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from pate_torch.api.inputs import is_table, to_dense
from pate_torch.core import checks, rng
from pate_torch.privacy import unit_ids
from pate_torch.privacy.schema import check_table_type, make_key


def split_public(
    *arrays: Any,
    share: float = 0.1,
    groups: Any = None,
    publish_split: bool = False,
    adjacency: str = "add_remove",
    random_state: int = 0,
) -> list[Any]:
    """Split records into a private part and a part that becomes public.

    For example: ``X, public, y, _ = split_public(X, y, publish_split=True)``, then ``fit(X, y, public=public)``.
    A keyed hash of each unit's name decides whether the unit becomes public, regardless of other units, as in train.py.
    The name is the id in ``groups``, or a hash of the record's values in all arrays. Under replace_one the position
    decides.

    Args:
        *arrays: PRIVATE. Records, labels and so on: data frames, arrays, sparse matrices or lists of one length N.
        share: Approximate share of the units that become public.
        groups: PRIVATE. Privacy unit of each record, such as a patient, [N]. None if the unit is a record.
        publish_split: Whether the owner agrees that these records become public.
        adjacency: Neighboring relation of the fit, "add_remove" or "replace_one".
        random_state: Key of the hash. Do not change it: each key makes other records public.

    Returns:
        The private part and the public part of the first array, then of the next array, and so on. The public part is
        shuffled, because records are often sorted by class.

    Raises:
        ValueError: An argument is wrong, the owner does not agree, or no record would become public.
    """
    checks.between("share", share, 0, 1, exclusive=True)
    checks.one_of("adjacency", adjacency, ("add_remove", "replace_one"))
    checks.integer("random_state", random_state, low=0, fix="The split must stay the same, so it needs a fixed key.")
    columns = [column for array in arrays for column in _list_columns(array)]
    counts = {len(column) for column in columns}
    if len(counts) != 1:
        raise checks.error("arrays", sorted(counts), "must be one array or more, of one length")
    if not checks.boolean("publish_split", publish_split):
        units = "records" if groups is None else "units, with all their records,"
        problem = f"about {share:.0%} of the {units} would become public: their values are published, and no epsilon"
        fix = "Pass publish_split=True if the owner agrees, or pass points from elsewhere to fit(public=...)."
        raise checks.error("publish_split", False, f"{problem} covers them", fix)
    (count,), fractions, files = counts, (1 - share, share, 0.0), {unit_ids.PRIVATE}
    if adjacency == "replace_one":
        if groups is not None:
            problem = "must be None under replace_one, whose unit is a record"
            raise checks.error("groups", type(groups).__name__, problem)
        role_N = unit_ids.assign_by_position(count, fractions, random_state)
    else:
        records = zip(*columns, strict=True)
        rows = ([make_key(cell).encode(errors="surrogatepass") for cell in row] for row in records)
        names = unit_ids.make_content_ids(rows) if groups is None else unit_ids.parse_unit_ids("groups", groups, count)
        role_N = unit_ids.assign_by_hash(names, np.full(count, unit_ids.PRIVATE), files, fractions, random_state)
    private, public = (np.flatnonzero(role_N == role) for role in (unit_ids.PRIVATE, unit_ids.PUBLIC))
    if not len(public):
        raise checks.error("share", share, "leaves no public points", "Pass a larger share.")
    public = public[rng.make_numpy_generator(0, "pool", "order").permutation(len(public))]
    return [_select(array, rows_S) for array in arrays for rows_S in (private, public)]


def _list_columns(x: Any) -> list[Any]:
    """List the columns of points or labels. A cell does not depend on the type that other cells give to its column."""
    if is_table(x):
        check_table_type("arrays", x)
        return [np.asarray(x[name]) for name in x.columns]
    x = np.array(x, dtype=object) if isinstance(x, list | tuple) else np.asarray(to_dense(x))
    is_image = x.dtype == np.uint8 and x.ndim > 2  # a table of small integers may be of this type
    return [[row.tobytes().hex() for row in x]] if is_image else list(x.reshape(len(x), -1).T)


def _select(x: Any, rows_S: np.ndarray) -> Any:
    if isinstance(x, list | tuple):
        return [x[row] for row in rows_S.tolist()]
    return x.iloc[rows_S] if hasattr(x, "iloc") else x[rows_S]
