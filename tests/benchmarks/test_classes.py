"""The class of listed predictors."""

import numpy as np
import pytest

from benchmarks.theory.classes import Listed


def test_a_list_keeps_one_of_predictors_that_agree():
    predictors = [lambda x: x[:, 0] > 0, lambda x: x[:, 0] > 0.01, lambda x: np.zeros(len(x))]
    assert Listed(predictors).enumerate_representatives(np.array([[-1.0], [1.0]])) == [0, 2]
    assert Listed(predictors).vc_dimension == 1 and Listed(predictors[:1]).vc_dimension == 0


def test_a_list_refuses_no_predictors_and_other_labels():
    with pytest.raises(ValueError, match="predictors"):
        Listed([])
    with pytest.raises(ValueError, match="each 0 or 1"):
        Listed([lambda x: x[:, 0]]).enumerate_representatives(np.array([[0.5], [2.0]]))
