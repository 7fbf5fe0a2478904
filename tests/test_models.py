"""Models by name."""

import pytest
import torch

from helpers.errors import InputError
from helpers.models import build_model


@pytest.mark.parametrize("name", ["small_cnn", "first_cnn", "resnet18", "mobilenet_v3_small"])
def test_models_map_images_to_class_scores(name):
    model = build_model(name, 7).eval()
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet", "ResNet18 ", "", "vgg_99"])
def test_an_unknown_model_names_what_there_is(name):
    with pytest.raises(InputError, match="small_cnn, first_cnn or a torchvision model"):
        build_model(name, 2)
