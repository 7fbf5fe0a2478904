"""Where images come from. ``sources.open_data`` opens the embedded digits, a reader's folder, or a torchvision
data set."""
