"""Privacy noise: its source, apart from every seeded stream, and exact integer samplers."""

from pate_torch.noise.source import DryRunNoise as DryRunNoise
from pate_torch.noise.source import NoiseSource as NoiseSource
