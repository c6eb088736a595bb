"""Methods of other libraries on the columns of a table: probabilities [T, C] of the test points.

``columns`` are private, public and test points [., D], of which public points give ranges and norms; ``label_N`` are
the classes of the private points.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable

import numpy as np

DELTA = 1e-5
Columns = tuple[np.ndarray, np.ndarray, np.ndarray]


def run_ebm(columns: Columns, label_N: np.ndarray, num_classes: int, epsilon: float) -> np.ndarray:
    """DP-EBM with public ranges: the first class against the rest, and so on; the budget is shared among them."""
    from interpret.privacy import DPExplainableBoostingClassifier

    private, public, test = columns
    low, high = public.min(0), public.max(0)
    high = np.where(high > low, high, low + 1)
    bounds = {i: (float(a), float(b)) for i, (a, b) in enumerate(zip(low, high, strict=True))}
    against = range(num_classes) if num_classes > 2 else [1]
    share_TC = np.zeros((len(test), num_classes))
    for c in against:
        budget = {"epsilon": epsilon / len(against), "delta": DELTA / len(against)}
        model = DPExplainableBoostingClassifier(**budget, privacy_bounds=bounds, n_jobs=1, random_state=None)
        model.fit(np.clip(private, low, high), (label_N == c).astype(int))
        proba = model.predict_proba(np.clip(test, low, high))
        share_TC[:, c] = proba[:, list(model.classes_).index(1)] if 1 in model.classes_ else 0
    if num_classes == 2:
        share_TC[:, 0] = 1 - share_TC[:, 1]
    return share_TC / share_TC.sum(1, keepdims=True).clip(1e-12)


def make_diffprivlib(python: str) -> Callable[[Columns, np.ndarray, int, float], np.ndarray]:
    """Its logistic regression in another interpreter; the norm of the data is the public points' 95th percentile.

    Version 0.6.5 divides the loss by the number of records but not the noise if scikit-learn is 1.4 or later: its
    answers are then chance at any epsilon. Version 0.6.6 does not, and needs scikit-learn<1.6.
    """
    code = (
        "import sys, numpy as np, warnings; warnings.simplefilter('ignore')\n"
        "import diffprivlib; assert diffprivlib.__version__ >= '0.6.6', diffprivlib.__version__\n"
        "from diffprivlib.models import LogisticRegression\n"
        "d = np.load(sys.argv[1] + '/in.npz')\n"
        "m = LogisticRegression(epsilon=float(d['epsilon']), data_norm=float(d['norm'])).fit(d['x'], d['y'])\n"
        "p = np.zeros((len(d['test']), int(d['classes']))); p[:, m.classes_] = m.predict_proba(d['test'])\n"
        "np.save(sys.argv[1] + '/out.npy', p)\n"
    )

    def run(columns: Columns, label_N: np.ndarray, num_classes: int, epsilon: float) -> np.ndarray:
        private, public, test = columns
        norm = np.quantile(np.linalg.norm(public, axis=1), 0.95)
        with tempfile.TemporaryDirectory() as folder:
            facts = {"x": private, "y": label_N, "test": test, "classes": num_classes}
            np.savez(f"{folder}/in.npz", **facts, epsilon=epsilon, norm=norm)
            subprocess.run([python, "-c", code, folder], check=True)
            return np.load(f"{folder}/out.npy")

    return run
