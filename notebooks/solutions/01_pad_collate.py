import torch


def pad_collate(samples):
    height = max(image.shape[1] for image, _ in samples)  # height and width may come from different images
    width = max(image.shape[2] for image, _ in samples)
    images = torch.zeros(len(samples), 3, height, width, dtype=torch.uint8)
    mask = torch.zeros(len(samples), height, width, dtype=torch.bool)
    for n, (image, _) in enumerate(samples):
        _, h, w = image.shape
        images[n, :, :h, :w] = image  # a grey image's one channel is broadcast to all three
        mask[n, :h, :w] = True  # from the size, not from the pixels: black is a colour, too
    return images, mask, torch.tensor([label for _, label in samples])
