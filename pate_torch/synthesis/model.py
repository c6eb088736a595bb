"""The released model of a table: its domain, the noisy tables, the mixture fitted to them, and rows drawn from it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from pate_torch.core import checks, files
from pate_torch.privacy.domain import TableDomain
from pate_torch.synthesis.mixture import Clique, NoisyTables, ProductMixture

MAX_POOL_ROWS = 50_000
"""Largest number of rows that a model keeps after rounds of votes."""


@dataclass(frozen=True, eq=False)
class TableModel:
    """Releasable. A model of a table, from which rows are drawn.

    ``size`` is the number of units, estimated from noisy counts. The mixture was fitted to the noisy ``tables``.
    ``pool_NJ`` are rows of codes after rounds of votes, int64 [N, J]. Without such rounds it is None, and rows are
    drawn from the mixture.
    """

    domain: TableDomain
    size: int
    tables: NoisyTables
    mixture: ProductMixture
    pool_NJ: np.ndarray | None = None

    def sample_codes(self, count: int, random: np.random.Generator) -> np.ndarray:
        checks.integer("num_rows", count, low=1)
        if self.pool_NJ is None:
            return self.mixture.sample(count, random)
        return self.pool_NJ[random.integers(len(self.pool_NJ), size=count)]

    def sample(self, count: int | None = None, seed: int = 0) -> dict[str, list[Any]]:
        """Draw rows as {column: cells}. By default as many as the estimated number of units."""
        random = np.random.default_rng(seed)
        codes_NJ = self.sample_codes(self.size if count is None else count, random)
        return self.domain.decode(codes_NJ, random)

    def save(self, path: Path) -> None:
        """Write the model into one file of tensors, with everything else in the header."""
        cliques = sorted(self.tables.counts)
        tensors = {f"column_{j}": p_KS.contiguous() for j, p_KS in enumerate(self.mixture.column_KS)}
        tensors |= {"weight": self.mixture.weight_K.contiguous()}
        tensors |= {"counts": torch.cat([self.tables.counts[clique].flatten() for clique in cliques]).to(torch.int32)}
        if self.pool_NJ is not None:
            tensors |= {"rows": torch.from_numpy(self.pool_NJ.astype(np.int32))}
        facts = {"domain": self.domain.to_dict(), "size": self.size, "cliques": cliques, "sigma": self.tables.sigma}
        metadata = {"pate_torch": json.dumps({"kind": "table", **facts}, allow_nan=False)}
        files.write_atomically(path, safetensors.torch.save(tensors, metadata))

    @classmethod
    def load(cls, path: Path) -> TableModel:
        """Load a model. Raises ValueError if the file is no such model."""
        try:
            with safetensors.safe_open(str(path), "pt") as file:
                facts = json.loads(file.metadata()["pate_torch"])
            tensors = safetensors.torch.load(path.read_bytes())
            domain = TableDomain.from_dict(facts["domain"])
            cliques = [tuple(map(int, clique)) for clique in facts["cliques"]]
            tables = NoisyTables(split_counts(tensors["counts"], domain.sizes, cliques), float(facts["sigma"]))
            columns = tuple(tensors[f"column_{j}"] for j in range(len(domain.columns)))
            if tuple(p_KS.shape[1] for p_KS in columns) != domain.sizes:
                raise ValueError("the columns of the mixture do not fit the domain")
            pool = tensors["rows"].long().numpy() if "rows" in tensors else None
            return cls(domain, int(facts["size"]), tables, ProductMixture(tensors["weight"], columns), pool)
        except (OSError, KeyError, TypeError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
            raise ValueError(f"{path}: is no model of a table ({type(error).__name__}: {error}).") from error


def split_counts(counts_M: torch.Tensor, sizes: Sequence[int], cliques: Sequence[Clique]) -> dict[Clique, torch.Tensor]:
    """Split the counts of all tables, one after another, into one table for each clique of columns."""
    shapes = [tuple(sizes[column] for column in clique) for clique in cliques]
    parts = counts_M.split([math.prod(shape) for shape in shapes])
    return {clique: part.view(shape) for clique, part, shape in zip(cliques, parts, shapes, strict=True)}
