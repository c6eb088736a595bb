"""Privacy accounting: costs in, (epsilon, delta) out. NumPy/SciPy float64, log space; no torch, no Hydra."""

from pate_torch.accounting.calibration import calibrate_noise as calibrate_noise
from pate_torch.accounting.calibration import compute_epsilon as compute_epsilon
from pate_torch.accounting.data_dependent import compute_data_dependent_epsilon as compute_data_dependent_epsilon
from pate_torch.accounting.prices import ConfidentPrice as ConfidentPrice
from pate_torch.accounting.prices import GaussianNoisyMaxPrice as GaussianNoisyMaxPrice
from pate_torch.accounting.prices import LaplaceNoisyMaxPrice as LaplaceNoisyMaxPrice
from pate_torch.accounting.prices import SparseVectorPrice as SparseVectorPrice
