"""Glyphs, and a trunk learnt from the public ones among them, once in a process."""

import functools

from benchmarks.fonts.glyphs import Glyphs
from pate_torch.features.augmentation import Affine
from pate_torch.features.contrastive import ContrastiveFeatures
from pate_torch.privacy.records import Dataset
from pate_torch.teachers.recipe import PublicStart, Trunk
from pate_torch.teachers.training import TeacherRecipe

AUGMENT = Affine(rotate=10, scale=0.1, shift=1, shear=5)
SOURCE = Glyphs(private=240, public=80, test=60, num_classes=3, size=12, shift=0.5, rotate=8, noise=0.05)
START = PublicStart(
    features=ContrastiveFeatures(
        network="small_cnn",
        network_options={"channels": [8, 16], "hidden": 24},
        steps=40,
        batch_size=32,
        augment=AUGMENT,
    )
)
RECIPE = TeacherRecipe(network="logistic", steps=60, batch_size=16, learning_rate=0.02, augment=AUGMENT, start=START)


@functools.cache
def glyphs() -> Dataset:
    return SOURCE.load()


@functools.cache
def public_trunk() -> Trunk:
    return START.learn(glyphs().pool.x, glyphs().spec, seed=0)
