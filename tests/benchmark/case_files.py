"""Plain images of compositionality data sets."""
from PIL import Image
from torchvision.transforms import Compose, Resize, ToTensor

TRANSFORM = Compose([Resize((8, 8)), ToTensor()])


def save_image(path, color, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (16, 12), color).save(path)
