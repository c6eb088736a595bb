"""A synthesizer of tables with the conventions of scikit-learn: ``TabularSynthesizer(epsilon=1).fit(df).sample()``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted

from pate_torch.api.estimator import AccountEstimator
from pate_torch.api.inputs import check_public_points, is_table, make_private_points_error
from pate_torch.api.messages import CLASSIFIER_WORDS, reword_errors
from pate_torch.api.pate import PATE
from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.methods.base import ModelRelease
from pate_torch.methods.synthetic import SyntheticTable
from pate_torch.privacy import records as origins
from pate_torch.privacy.domain import TableDomain
from pate_torch.privacy.schema import make_key, map_distinct, to_text_columns
from pate_torch.privacy.unit_ids import name_unit, parse_unit_ids
from pate_torch.release.renderer import copy_release
from pate_torch.release.table_report import measure_usefulness
from pate_torch.session import ReleaseSession
from pate_torch.synthesis.model import TableModel
from pate_torch.teachers.store import RecordHashes


@dataclass(eq=False, repr=False)
class TabularSynthesizer(AccountEstimator):
    """A differentially private synthesizer of tables.

    Args:
        epsilon: Privacy cost of the fit, in epsilon.
        account: Name of the ledger account of the private records, as for ``PATEClassifier``.
        target: Column whose relations with pairs of other columns are kept, such as a diagnosis. None to keep the
            relations of all pairs of columns alike.
        public: Public rows with the same columns, off which types, categories and bins are read; never rows of ``X``.
            None with ``schema``.
        schema: Declared columns (``TableDomain.from_dict``), a ``TableDomain``, or the path of a YAML file. None with
            ``public``.
        num_records_about: Approximate number of private units, if it is public.
        delta: Delta of the guarantee, which should be far below 1/(number of units).
        rounds: Number of rounds of votes for candidate rows, which find relations among many columns at once.
        noise: Kind of noise, "torch" or "discrete".
        random_state: Seed of the model and of the rows, never of the noise. None draws a new seed for each fit.
        cap: Largest total epsilon of the account, as for ``PATEClassifier``.
        adjacency: Neighboring relation, "add_remove", or "replace_one" if each record is a unit.
        allow_refit: Whether to charge an account that has already been charged, if only by a fit that stopped.
        allow_duplicate_account: Whether these rows may also be charged to an account of another name.
        spend_anyway: Whether to spend the whole epsilon even if no table has more signal than noise.
        chosen_by: How this release was chosen among several, as for ``PATEClassifier``. None if not stated.
        home: Folder of ledger and runs, as for ``PATEClassifier``.
        verbose: Whether to print the plan, the charge and the progress.
        callback: Function callback(stage, done, total) that is told the progress. None to tell nothing.

    Attributes:
        domain_: Columns of the table, which are published.
        model_: Released model (``synthesis.model.TableModel``).
        privacy_, total_, release_: As for ``PATEClassifier``.
    """

    _: KW_ONLY
    target: str | None = None
    public: Any = None
    schema: Any = None
    num_records_about: int | None = None
    rounds: int = 0
    noise: str = "torch"

    @reword_errors(CLASSIFIER_WORDS)
    def fit(self, X: Any, y: Any = None, *, groups: Any = None) -> TabularSynthesizer:
        """Charge the account, and fit the released model.

        Args:
            X: PRIVATE. DataFrame or {column: cells}. Columns that the domain does not have are ignored.
            y: Not used.
            groups: PRIVATE. Privacy unit of each row, such as a patient, [N], or the name of the column of ``X`` that
                holds the units. One row of each unit is counted. None if the unit is a row.

        Raises:
            ValueError: An argument is wrong, and nothing has been charged.
            BudgetExceeded: The charge would exceed the cap of the account. Nothing has been drawn or charged.
            ReleaseStopped: The noisy number of units shows that no table has more signal than noise. Only this number
                is charged, and another fit needs ``allow_refit``.
        """
        self._check_account()
        domain = self._make_domain()
        if not is_table(X) and not isinstance(X, Mapping):
            raise checks.error("X", type(X).__name__, "must be a DataFrame or {column: cells}")
        code_NJ = domain.encode(X)
        unit = name_unit(groups)
        if isinstance(groups, str):
            names = [name for name in X if name not in {column.name for column in domain.columns}]
            groups, unit = X[checks.one_of("groups", groups, names)], f"group:{groups}"
        unit_ids = None if groups is None else parse_unit_ids("groups", groups, len(code_NJ))
        if self.public is not None:
            check_public_rows(X, self.public, domain, unit_ids)
        checks.optional(checks.integer, "num_records_about", self.num_records_about)
        with self._explain_errors():
            pate, method = self._make_pate_of_table(domain, unit)
            target_N = torch.from_numpy(code_NJ[:, method.target_index])
            pate.fit_teachers(torch.from_numpy(code_NJ.astype(np.float32)), target_N, unit_id=unit_ids)
            data = pate.make_data(np.zeros((1, code_NJ.shape[1]), dtype=np.float32))
            plan = f"noisy tables of {len(domain.columns)} columns, and a model fitted to them"
            self._announce(f"{self._format_terms(unit)}: {plan}.")
            self._release(self._make_model_config(pate, data, self.num_records_about, self.epsilon), code_NJ)
        self.domain_, self._table_type = domain, type(X) if is_table(X) else dict
        return self

    def _release(self, config: RunConfig, code_NJ: np.ndarray) -> None:
        """Make the release, and compare its rows with the private rows in the folder of the owner."""
        with ReleaseSession.open(config) as session:
            written = session.run()
            assert isinstance(written.release, ModelRelease) and isinstance(written.release.model, TableModel)
            model = written.release.model
            rows = model.sample_codes(model.size, np.random.default_rng(config.seed))  # those of synthetic.csv
            self._report = session.publish(written, None, shows_table=False)
            (session.private_dir / "summary.json").write_text(json.dumps(compare_tables(model, rows, code_NJ)) + "\n")
        session.finish()
        self.model_, self._seed = model, config.seed
        self._set_release(session.release_dir)

    def sample(self, num_rows: int | None = None, random_state: int = 0) -> Any:
        """Draw synthetic rows, of the type of the fitted table. By default as many as the noisy number of units."""
        check_is_fitted(self, "model_")
        return self._table_type(self.model_.sample(num_rows, random_state))

    @reword_errors(CLASSIFIER_WORDS)
    def save_release(self, folder: Path | str, *, evaluation: Any = None) -> Path:
        """Copy everything that may be published into a new folder.

        Args:
            folder: Folder that does not exist or is empty.
            evaluation: PUBLIC test rows, a DataFrame with all columns. The accuracy of two classifiers of the target
                that are trained on the synthetic rows is published in the copy. Never pass private rows: no guarantee
                would cover them. None to publish no accuracy.

        Raises:
            ValueError: The folder is not empty, or ``evaluation`` is given without a ``target``.
        """
        check_is_fitted(self, "model_")
        report = None
        if evaluation is not None:
            if not is_table(evaluation) and not isinstance(evaluation, Mapping):
                raise checks.error("evaluation", type(evaluation).__name__, "must be a DataFrame with all columns")
            with reword_errors({r"^table(?==)": "evaluation"}):
                code_NJ = self.domain_.encode(evaluation)
            if len(code_NJ) == 0:
                raise checks.error("evaluation", "0 rows", "must hold at least one row")
            rows = measure_usefulness(self.model_, code_NJ, self._seed)
            report = replace(self._report, evaluation=replace(self._report.evaluation, baselines=rows))
        return copy_release(self.release_, Path(folder), report)

    def _make_domain(self) -> TableDomain:
        if self.public is None and self.schema is None:
            fix = "Pass public rows, or declare the columns in schema=."
            raise checks.error("schema", None, "must be given, or else public", fix)
        if self.public is not None and self.schema is not None:
            problem = "cannot be combined with public, because either of them determines the columns"
            raise checks.error("schema", type(self.schema).__name__, problem, "Pass only one of the two.")
        if self.public is not None:
            domain = TableDomain.from_public(self.public, target=self.target)
        elif isinstance(self.schema, TableDomain):
            domain = self.schema
        elif isinstance(self.schema, str | Path):
            domain = read_domain(Path(self.schema))
        else:
            domain = TableDomain.from_dict(self.schema)
        return domain if self.target is None else replace(domain, target=self.target)

    def _make_pate_of_table(self, domain: TableDomain, unit: str) -> tuple[PATE, SyntheticTable]:
        seed, width = self._draw_seed(), len(domain.columns)
        method = SyntheticTable(domain=domain, rounds=self.rounds, seed=seed, kind=self.noise)
        origin = origins.FROM_PUBLIC_POINTS if self.public is not None else origins.FROM_OWNER
        pate = self._make_pate(
            method,
            classes=domain.sizes[method.target_index],
            unit=unit,
            seed=seed,
            provenance={origins.CATEGORIES: origin},
            mean=[0.0] * width,
            std=[1.0] * width,
        )
        return pate, method


def check_public_rows(X: Any, public: Any, domain: TableDomain, unit_ids: np.ndarray | None) -> None:
    """Refuse private rows as public rows, as ``check_public_points`` does. The refusal is for the owner alone.

    Raises:
        ValueError: ``public`` is ``X`` or shares its memory; or more than half of the distinct public rows equal
            private rows, beyond the share due to chance (``RecordHashes.compute_known_share``).
    """
    check_public_points(X, public, torch.zeros(0), torch.zeros(0), is_real=False)
    names = [column.name for column in domain.columns]
    tables = [to_text_columns(table, names, array=False) for table in (public, X)]
    row_M = np.zeros(sum(len(table[names[0]]) for table in tables), dtype=np.int64)  # public rows, then private rows
    for name in names:
        numbers: dict[str, int] = {}
        number_M = np.concatenate([map_distinct(table[name], _make_numbering(numbers), np.int64) for table in tables])
        row_M = np.unique(row_M * len(numbers) + number_M, return_inverse=True)[1]
    public_rows, private_N = np.unique(row_M[: len(tables[0][names[0]])]), row_M[len(tables[0][names[0]]) :]
    unit_N = np.arange(len(private_N)) if unit_ids is None else np.unique(unit_ids, return_inverse=True)[1]
    charged_rows = RecordHashes.from_rows(private_N.astype(np.uint64), unit_N.astype(np.int64))
    share = RecordHashes.from_rows(public_rows.astype(np.uint64), np.arange(len(public_rows))).compute_known_share(
        charged_rows
    )
    if share > 0.5:
        num_equal = int(np.isin(public_rows, private_N).sum())
        raise make_private_points_error(f"{num_equal} of {len(public_rows)} distinct rows")


def _make_numbering(numbers: dict[str, int]) -> Callable[[str], int]:
    return lambda value: numbers.setdefault(make_key(value), len(numbers))


def read_domain(path: Path) -> TableDomain:
    """Read the declared columns of a table from a YAML file."""
    import yaml

    try:
        columns = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise checks.error("schema", str(path), f"cannot be read ({' '.join(str(error).split())})") from error
    return TableDomain.from_dict(columns)


def compare_tables(model: TableModel, rows_NJ: np.ndarray, private_NJ: np.ndarray) -> dict[str, Any]:
    """PRIVATE. Compare synthetic rows with the private rows, for the owner alone: total variation of marginals."""
    sizes = model.domain.sizes
    result: dict[str, Any] = {"note": "for the owner alone: no epsilon covers these numbers"}
    for order in (1, 2):
        distances = []
        for columns in itertools.combinations(range(len(sizes)), order):
            shares = [_compute_shares(codes, sizes, columns) for codes in (rows_NJ, private_NJ)]
            distances.append(0.5 * float(np.abs(shares[0] - shares[1]).sum()))
        result[f"total_variation_{order}"] = float(np.mean(distances))
    return result


def _compute_shares(codes_NJ: np.ndarray, sizes: Sequence[int], columns: Sequence[int]) -> np.ndarray:
    shape = [sizes[column] for column in columns]
    cell_N = np.ravel_multi_index([codes_NJ[:, column] for column in columns], shape)
    return np.bincount(cell_N, minlength=int(np.prod(shape))) / max(1, len(codes_NJ))
