"""Drawings of characters as a folder of images, and weights of a network for them, made without a network connection.

    python examples/drawings.py drawings

writes 2,400 private drawings of the letters A to J (private/<letter>/*.png), 400 public drawings without labels
(public/*.png), 300 labeled test drawings (test/<letter>/*.png), and weights of torchvision's resnet18 (resnet18.pth),
which were trained on public drawings of Greek and Cyrillic letters. The drawings stand for images of yours, and the
weights for a file that somebody trained on other images. The page docs/tutorials/images.md uses them.
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torchvision
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torchvision.transforms import v2

SIZE = 32  # pixels
PRIVATE_LETTERS = "ABCDEFGHIJ"
OTHER_LETTERS = "ΓΔΘΛΞΠΣΦΨΩαβγδεζηθλμξπστφψωБДЖЗИЛУФЦЧШЫЭЮЯбвжзкмнтюя"
FONTS = [
    *(f"DejaVu{family}{style}" for family in ("Sans", "SansMono") for style in ("", "-Bold", "-Oblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic")),
]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # by which torchvision normalizes images for resnet18


def load_fonts() -> list[ImageFont.FreeTypeFont]:
    """Load fonts that come with matplotlib."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return [ImageFont.truetype(str(folder / f"{name}.ttf"), 2 * SIZE) for name in FONTS]


def draw(letter: str, fonts: list[ImageFont.FreeTypeFont], generator: np.random.Generator) -> Image.Image:
    """Draw a letter in a random font, color and place, on paper of another color, with stains and grain."""
    paper = generator.uniform(150, 255, 3)
    ink = paper - generator.uniform(70, 150, 3)
    sheet, mask = Image.new("RGB", (4 * SIZE, 4 * SIZE), tuple(paper.astype(int))), Image.new("L", (4 * SIZE,) * 2)
    pencil = ImageDraw.Draw(sheet)
    for _ in range(4):
        stain, (x, y), radius = (
            tuple((paper - generator.uniform(0, 60, 3)).astype(int)),
            generator.uniform(0, 128, 2),
            30,
        )
        pencil.ellipse((x - radius, y - radius, x + radius, y + radius), fill=stain)
    sheet = sheet.filter(ImageFilter.GaussianBlur(6))
    font = fonts[generator.integers(len(fonts))]
    place = 2 * SIZE + generator.uniform(-10, 10, 2)
    ImageDraw.Draw(mask).text(tuple(place), letter, fill=255, font=font, anchor="mm")
    angle, shear, scale = (
        np.radians(generator.uniform(-20, 20)),
        generator.uniform(-0.2, 0.2),
        generator.uniform(0.7, 1.1),
    )
    cos, sin, center = np.cos(angle) / scale, np.sin(angle) / scale, 2 * SIZE
    warp = np.array([[cos, sin + shear], [-sin, cos]])
    shift = center - warp @ [center, center]
    mask = mask.transform(mask.size, Image.Transform.AFFINE, (*warp[0], shift[0], *warp[1], shift[1]), 2)
    sheet.paste(tuple(ink.clip(0).astype(int)), mask=mask)
    pixels = np.asarray(sheet.resize((SIZE, SIZE), Image.Resampling.BOX)) + generator.normal(0, 8, (SIZE, SIZE, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def draw_many(letters: str, count: int, seed: int) -> list[tuple[str, Image.Image]]:
    """Draw so many random letters."""
    generator, fonts = np.random.default_rng(seed), load_fonts()
    chosen = generator.choice(list(letters), count)
    return [(str(letter), draw(str(letter), fonts, generator)) for letter in chosen]


def write(folder: Path, drawings: list[tuple[str, Image.Image]], has_classes: bool) -> None:
    """Write drawings as PNG files into class folders, or without them."""
    for number, (letter, image) in enumerate(drawings):
        file = folder / (letter if has_classes else "") / f"drawing{number:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)


def train_network(drawings: list[tuple[str, Image.Image]], steps: int) -> torch.nn.Module:
    """Train a resnet18 to tell the letters of public drawings apart."""
    torch.manual_seed(0)
    names = sorted({letter for letter, _ in drawings})
    prepare = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    x = torch.stack([prepare(image) for _, image in drawings])
    y = torch.tensor([names.index(letter) for letter, _ in drawings])
    network = torchvision.models.resnet18(num_classes=len(names)).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        batch = torch.randint(len(x), (64,))
        loss = torch.nn.functional.cross_entropy(network(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"resnet18: step {step + 1} of {steps}, loss {loss.item():.2f}", flush=True)
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300, help="training steps of the network")
    options = parser.parse_args()
    write(options.folder / "private", draw_many(PRIVATE_LETTERS, 2400, seed=1), has_classes=True)
    write(options.folder / "public", draw_many(PRIVATE_LETTERS, 400, seed=2), has_classes=False)
    write(options.folder / "test", draw_many(PRIVATE_LETTERS, 300, seed=3), has_classes=True)
    network = train_network(draw_many(OTHER_LETTERS, 8000, seed=4), options.steps)
    torch.save(network.state_dict(), options.folder / "resnet18.pth")
    print(f"wrote {options.folder}: private, public, test, resnet18.pth")


if __name__ == "__main__":
    main()
