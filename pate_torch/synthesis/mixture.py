"""A mixture of product distributions that is fitted to noisy marginal tables. Everything here is post-processing.

Component k has a weight w_k and one distribution p_kj of each column j, so the rows of a component have independent
columns. Marginals of the mixture are sums of products, such as sum_k w_k p_ki(a) p_kj(b) for the columns i and j, and
rows are drawn in two steps: a component, and then each column. All marginals of one order are one matrix product of
the distributions of the components, side by side in a matrix Z [K, D] with D codes in all.

Source: Liu, Vietri & Wu 2021 (GEM: a mixture of products fitted to noisy marginals by gradient descent); Aydore et al.
2021 (relaxed projection).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pate_torch.core.progress import Progress, do_nothing
from pate_torch.core.rng import make_torch_generator

_MIN_SHARE, _VARIATION = 1e-3, 0.3
"""Share that is added to each code at the start, and standard deviation of the variation of its logarithm."""
Clique = tuple[int, ...]
"""Columns of a marginal table, in increasing order."""


@dataclass(frozen=True, eq=False)
class NoisyTables:
    """Releasable. Noisy marginal tables with one noise scale.

    Attributes:
        counts: Noisy number of units for each combination of codes, by the columns of the table.
        sigma: Standard deviation of the noise of each count, in units.
    """

    counts: Mapping[Clique, Tensor]
    sigma: float

    def estimate_size(self) -> float:
        """Estimate the number of units by the mean total of the tables, weighted by their variances; at least 1."""
        total = sum(float(counts.sum()) / counts.numel() for counts in self.counts.values())
        return max(1.0, total / sum(1 / counts.numel() for counts in self.counts.values()))


@dataclass(frozen=True, eq=False)
class ProductMixture:
    """Releasable. A mixture of product distributions over the codes of a table.

    Attributes:
        weight_K: Weight of each component, float32 [K], which sum to 1.
        column_KS: Distribution of each column in each component, float32 [K, size of the column].
    """

    weight_K: Tensor
    column_KS: tuple[Tensor, ...]

    def sample(self, count: int, random: np.random.Generator) -> np.ndarray:
        """Draw rows of codes, int64 [count, J]."""
        weight_K = self.weight_K.double().numpy()
        component_N = random.choice(len(weight_K), size=count, p=weight_K / weight_K.sum())
        columns = [draw_codes(p_KS.double().numpy()[component_N], random) for p_KS in self.column_KS]
        return np.stack(columns, 1)


def draw_codes(probability_NS: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw one code for each row of probabilities, int64 [N]."""
    cumulative_NS = probability_NS.cumsum(1)
    threshold_N1 = random.random((len(probability_NS), 1)) * cumulative_NS[:, -1:]
    return np.minimum((threshold_N1 >= cumulative_NS).sum(1), probability_NS.shape[1] - 1)


def fit_mixture(
    tables: NoisyTables,
    sizes: Sequence[int],
    target: int,
    *,
    num_components: int = 200,
    steps: int = 300,
    learning_rate: float = 0.03,
    seed: int = 0,
    progress: Progress = do_nothing,
) -> ProductMixture:
    """Fit a mixture to noisy tables by least squares with Adam.

    The fit starts at independent columns for each code of the target (``estimate_independent``), with a little random
    variation between components. The number of steps is small, because more steps would fit the noise.

    Args:
        tables: Noisy tables.
        sizes: Number of codes of each column.
        target: Column whose codes the components start with. Some table must have this column with each other column.
        num_components: Number K of components.
        steps: Number of steps.
        learning_rate: Learning rate of the first step, which falls to 1 % along a line.
        seed: Seed of the initialization.
        progress: Function that receives (done, total).
    """
    targets = _group_tables(tables, sizes)
    start = estimate_independent(tables, sizes, target)
    class_K = torch.arange(num_components) % sizes[target]
    logits_KD = torch.cat([(p_KS + _MIN_SHARE).log()[class_K] for p_KS in start.column_KS], 1)
    generator = make_torch_generator(seed, "synthesis", "mixture")
    logits_KD = (logits_KD + _VARIATION * torch.randn(logits_KD.shape, generator=generator)).requires_grad_()
    logits_K = (start.weight_K + _MIN_SHARE).log()[class_K].requires_grad_()
    optimizer = torch.optim.Adam([logits_KD, logits_K], lr=learning_rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - 0.99 * step / steps)
        column_KS = [part_KS.softmax(1) for part_KS in logits_KD.split(list(sizes), 1)]
        weight_K = logits_K.softmax(0)
        loss = torch.stack([block.compute_loss(weight_K, column_KS) for block in targets]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress(step + 1, steps)
    columns = tuple(part_KS.softmax(1).detach() for part_KS in logits_KD.split(list(sizes), 1))
    return ProductMixture(logits_K.softmax(0).detach(), columns)


def estimate_independent(tables: NoisyTables, sizes: Sequence[int], target: int) -> ProductMixture:
    """Estimate the mixture with one component for each code of the target, in which all columns are independent.

    The noisy counts of a column and the target are averaged over all tables that have both (``average_tables``).
    """
    columns = []
    for column, size in enumerate(sizes):
        if column == target:
            columns.append(torch.eye(size))
            continue
        counts_CS = average_tables(tables, (target, column), sizes)
        columns.append(torch.stack([project_to_simplex(counts_S) for counts_S in counts_CS]).float())
    return ProductMixture(project_to_simplex(average_tables(tables, (target,), sizes)).float(), tuple(columns))


def average_tables(tables: NoisyTables, clique: Clique, sizes: Sequence[int]) -> Tensor:
    """Average the noisy counts of some columns over all tables that have them, weighted by their variances."""
    total, weights = torch.zeros([sizes[column] for column in clique], dtype=torch.float64), 0.0
    for columns, counts in tables.counts.items():
        if set(clique) <= set(columns):
            others = [axis for axis, column in enumerate(columns) if column not in clique]
            part = counts.double().sum(others) if others else counts.double()
            kept = [column for column in columns if column in clique]
            weight = part.numel() / counts.numel()
            total += weight * part.permute([kept.index(column) for column in clique])
            weights += weight
    return total / weights


def project_to_simplex(counts_S: Tensor) -> Tensor:
    """Return the nearest probabilities to noisy counts over their total, float64 [S]."""
    share_S = counts_S.double() / counts_S.double().sum().clamp(min=1.0)
    ordered_S = share_S.sort(descending=True).values
    excess_S = (ordered_S.cumsum(0) - 1) / torch.arange(1, len(ordered_S) + 1)
    num_positive = int((ordered_S > excess_S).sum())
    return (share_S - excess_S[num_positive - 1]).clamp(min=0)


@dataclass(frozen=True, eq=False)
class _TargetBlock:
    """Tables that share all columns but the last, which are computed by one matrix product.

    ``share_MS`` are the noisy counts over the number of units, the tables side by side, [cells of the prefix, codes].
    ``scale`` is the number of units over the standard deviation of the noise.
    """

    prefix: Clique
    last: Clique
    share_MS: Tensor
    scale: float

    def compute_loss(self, weight_K: Tensor, column_KS: Sequence[Tensor]) -> Tensor:
        """Compute half of the sum of the squared errors in units of the noise."""
        part_KM = weight_K[:, None]
        for column in self.prefix:
            part_KM = (part_KM[:, :, None] * column_KS[column][:, None, :]).flatten(1)
        model_MS = part_KM.T @ torch.cat([column_KS[column] for column in self.last], 1)
        return 0.5 * ((model_MS - self.share_MS) * self.scale).square().sum()


def _group_tables(tables: NoisyTables, sizes: Sequence[int]) -> list[_TargetBlock]:
    """Group the tables by all columns but the last, so that one matrix product computes a group.

    The columns of each table are sorted by the number of tables that have them, so that groups are large.
    """
    uses = Counter(column for clique in tables.counts for column in clique)
    blocks = defaultdict[Clique, list[tuple[int, Tensor]]](list)
    for clique, counts in tables.counts.items():
        order = sorted(range(len(clique)), key=lambda axis: (-uses[clique[axis]], clique[axis]))
        prefix, last = tuple(clique[axis] for axis in order[:-1]), clique[order[-1]]
        blocks[prefix].append((last, counts.permute(order).float().reshape(-1, sizes[last])))
    num_units, result = tables.estimate_size(), []
    for prefix, parts in blocks.items():
        share_MS = torch.cat([counts for _, counts in parts], 1) / num_units
        result.append(_TargetBlock(prefix, tuple(last for last, _ in parts), share_MS, num_units / tables.sigma))
    return result
