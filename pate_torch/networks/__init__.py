"""Networks of teachers and students: built by name, described by plain data, initialized from one stream."""

from pate_torch.networks.architectures import NETWORKS as NETWORKS
from pate_torch.networks.architectures import build as build
from pate_torch.networks.architectures import describe as describe
from pate_torch.networks.architectures import initialize as initialize
from pate_torch.networks.architectures import rebuild as rebuild
from pate_torch.networks.modules import ConcatFeatures as ConcatFeatures
from pate_torch.networks.modules import Flatten as Flatten
from pate_torch.networks.modules import Fourier as Fourier
from pate_torch.networks.modules import L2Normalize as L2Normalize
from pate_torch.networks.modules import MeanShift as MeanShift
from pate_torch.networks.modules import Residual as Residual
from pate_torch.networks.modules import Voting as Voting
from pate_torch.networks.modules import count_parameters as count_parameters
from pate_torch.networks.modules import get_last_linear as get_last_linear
from pate_torch.networks.modules import make_feature_extractor as make_feature_extractor
from pate_torch.networks.modules import remove_head as remove_head
