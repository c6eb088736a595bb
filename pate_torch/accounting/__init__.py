"""Privacy accounting: costs in, (epsilon, delta) out. NumPy/SciPy float64, log space; no torch, no Hydra."""

from pate_torch.accounting.calibration import calibrate_noise as calibrate_noise
from pate_torch.accounting.calibration import compute_epsilon as compute_epsilon
from pate_torch.accounting.costs import ConfidentCost as ConfidentCost
from pate_torch.accounting.costs import GaussianNoisyMaxCost as GaussianNoisyMaxCost
from pate_torch.accounting.costs import LaplaceNoisyMaxCost as LaplaceNoisyMaxCost
from pate_torch.accounting.costs import SparseVectorCost as SparseVectorCost
from pate_torch.accounting.data_dependent import compute_data_dependent_epsilon as compute_data_dependent_epsilon
