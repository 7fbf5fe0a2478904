"""A first training script, as tutorials write it: whole, and repaired only where it would not have run.

What the course starts from. It trains like ``helpers.train --preset seed`` (a test holds the two together), and
most of what the chapters teach can be found by asking of each line: what does this cost, and what does it get
wrong?
"""

import sys

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

from helpers.data.digits import ensure_digits


class ImageListDataset(Dataset):
    def __init__(self, images, labels, transform=None):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = Image.open(self.images[index]).convert("RGB")
        return self.transform(image) if self.transform else image, self.labels[index]


def main(folder, epochs=1, size=64):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    found = datasets.ImageFolder(f"{folder}/train")
    steps = [transforms.Resize((size, size)), transforms.ToTensor()]
    steps.append(transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]))
    dataset = ImageListDataset([path for path, _ in found.samples], found.targets, transforms.Compose(steps))
    loader = DataLoader(dataset, batch_size=32, num_workers=4)

    features = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    head = nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, len(found.classes)))
    model = nn.Sequential(features, head).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")

    losses = []
    for epoch in range(epochs):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, dtype=torch.float16, enabled=device == "cuda"):
                loss = criterion(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ensure_digits())
