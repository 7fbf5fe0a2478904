"""Models by name."""

import pytest
import torch

from helpers.errors import InputError
from helpers.models import build_model, require_fit


@pytest.mark.parametrize("name", ["small_cnn", "first_cnn", "resnet18", "mobilenet_v3_small"])
def test_models_map_images_to_class_scores(name):
    model = build_model(name, 7).eval()
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)


def test_a_model_that_does_not_fit_is_found_without_touching_it():
    model = build_model("small_cnn", 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    require_fit(model, torch.zeros(2, 3, 32, 32), 3)
    for images, classes, hint in ((torch.zeros(2, 3, 8, 8), 3, "8 px"), (torch.zeros(2, 3, 32, 32), 4, "one score")):
        with pytest.raises(InputError, match=hint) as caught:
            require_fit(model, images, classes)
        assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", ["resnet", "ResNet18 ", "", "vgg_99"])
def test_an_unknown_model_names_what_there_is(name):
    with pytest.raises(InputError, match="small_cnn, first_cnn or a torchvision model"):
        build_model(name, 2)
