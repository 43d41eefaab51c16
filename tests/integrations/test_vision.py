"""timm, torchvision and diffusers with a wrapped model: losses, reloaded weights, resumed trainings are PyTorch's."""

import copy

import pytest
import torch
import torch.nn.functional as F

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("at_once")]
datasets = pytest.importorskip("sklearn.datasets")

from ortmodule import ORTModule, explain  # noqa: E402
from ortmodule.runtime.calls import parts  # noqa: E402
from tests.integrations.small import WORK  # noqa: E402

STEPS, BATCH, SIDE = 6, 4, 32
#: Compiled operators of torchvision. One that was built for another torch cannot load them.
OPERATORS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor", ("nms", "qnms")


def library(name):
    try:
        pytest.importorskip("torchvision")
    except RuntimeError:
        for operator in OPERATORS[1]:
            torch.library.define(f"torchvision::{operator}", OPERATORS[0])
    return pytest.importorskip(name)


def suppressed(boxes, scores, threshold):
    """Indices of the boxes that overlap with none of a higher score by more than ``threshold``, best first."""
    from torchvision.ops import box_iou

    order, kept = scores.argsort(descending=True, stable=True), []
    overlaps = (box_iou(boxes, boxes) > threshold).tolist()
    for index in order.tolist():
        if not any(overlaps[index][other] for other in kept):
            kept.append(index)
    return torch.tensor(kept, dtype=torch.long)


@pytest.fixture
def operators(monkeypatch):
    """In place of compiled ones that cannot be loaded. (Regions are aligned in Python then, by torchvision itself.)"""
    library("torchvision")
    from torchvision import extension
    from torchvision.ops import boxes

    if not extension._has_ops():
        monkeypatch.setattr(boxes, "nms", suppressed)


@pytest.fixture
def parts_at_once(monkeypatch):
    """They do not wait for calls that turn out to be long."""
    monkeypatch.setattr(parts, "LEAST_CALLS", 0)
    monkeypatch.setattr(parts, "LEAST_SECONDS", 0.0)


def images():
    """Digits as images of three channels, and what they show."""
    found = datasets.load_digits()
    pixels = torch.tensor(found.images[: 2 * STEPS * BATCH], dtype=torch.float32)[:, None] / 16
    large = F.interpolate(pixels, size=(SIDE, SIDE), mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.tensor(found.target[: 2 * STEPS * BATCH])
    return list(zip(large.split(BATCH), labels.split(BATCH), strict=True))


class Classifier:
    """timm: a ViT."""

    #: Steps after which the last bits of weights decide what is learnt from, in PyTorch as well.
    alike = STEPS

    def make(self):
        return library("timm").create_model(
            "vit_tiny_patch16_224", img_size=SIDE, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10
        )

    def wrap(self, model):
        return ORTModule(model)

    def loss(self, model, pixels, labels):
        return F.cross_entropy(model(pixels), labels)

    def reports(self, model):
        """Of what the engine has of it."""
        yield explain(model)

    def saved(self, model, plain, folder):
        """``model``, saved, and read into a module that knows nothing of ORTModule."""
        torch.save(model.state_dict(), folder / "weights.pt")
        again = copy.deepcopy(plain)
        again.load_state_dict(torch.load(folder / "weights.pt"))
        return again


class ConvolutionalClassifier(Classifier):
    """timm: a ConvNeXt."""

    def make(self):
        return library("timm").create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), num_classes=10)


class Segmentation(Classifier):
    """torchvision: where a digit is, by pixel."""

    def make(self):
        library("torchvision")
        from torchvision.models.segmentation import lraspp_mobilenet_v3_large

        model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):  # of maps of two by two pixels
                module.eval()
        return model

    def loss(self, model, pixels, labels):
        return F.cross_entropy(model(pixels)["out"], (pixels[:, 0] > 0.5).long())


class Detection(Classifier):
    """torchvision: a RetinaNet, whose backbone is wrapped."""

    def make(self):
        library("torchvision")
        from torchvision.models.detection import RetinaNet
        from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

        backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
        return RetinaNet(backbone, 11, min_size=SIDE, max_size=SIDE)

    def wrap(self, model):
        model.backbone = ORTModule(model.backbone)
        return model

    def loss(self, model, pixels, labels):
        box = torch.tensor([[4.0, 2.0, 28.0, 30.0]])
        targets = [{"boxes": box, "labels": label[None] + 1} for label in labels]
        return sum(model(list(pixels), targets).values())

    def reports(self, model):
        yield explain(model.backbone)


class Regions(Detection):
    """torchvision: a Faster R-CNN, whose backbone is wrapped."""

    name, alike = "FasterRCNN", 3

    def make(self):
        library("torchvision")
        from torchvision.models import detection
        from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

        backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
        fewer = {"rpn_pre_nms_top_n_train": 32, "rpn_post_nms_top_n_train": 16, "box_batch_size_per_image": 8}
        return getattr(detection, self.name)(backbone, 11, min_size=SIDE, max_size=SIDE, **fewer)

    def loss(self, model, pixels, labels):
        torch.manual_seed(int(labels.sum()))  # it draws which boxes it learns from
        targets = [
            {"boxes": torch.tensor([[4.0, 2.0, 28.0, 30.0]]), "labels": label[None] + 1, "masks": mask[None]}
            for label, mask in zip(labels, (pixels[:, 0] > 0.5).byte(), strict=True)
        ]
        return sum(model(list(pixels), targets).values())


class Masks(Regions):
    """torchvision: a Mask R-CNN, whose backbone is wrapped."""

    name = "MaskRCNN"


class Whole(Detection):
    """The same, where the detector is wrapped: what can be captured of it is graphs of their own."""

    parts = ("backbone", "head")

    def wrap(self, model):
        return ORTModule(model)

    def reports(self, model):
        parts = explain(model).parts
        assert set(parts) >= {name.partition(".")[0] for name in self.parts}
        for name in self.parts:
            outer, _, inner = name.partition(".")
            yield parts[outer].parts[inner] if inner else parts[outer]
        assert explain(model).weights_in_engine >= WORK


class WholeRegions(Whole, Regions):
    parts = ("backbone", "rpn.head", "roi_heads.box_head", "roi_heads.box_predictor")


class WholeMasks(Whole, Masks):
    parts = (*WholeRegions.parts, "roi_heads.mask_head", "roi_heads.mask_predictor")


class Diffusion(Classifier):
    """diffusers: the noise in an image."""

    def make(self):
        self.scheduler = library("diffusers").DDPMScheduler(num_train_timesteps=50)
        return library("diffusers").UNet2DModel(
            sample_size=SIDE, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
            norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"), attention_head_dim=4,
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip

    def loss(self, model, pixels, labels):
        random = torch.Generator().manual_seed(int(labels.sum()))
        noise = torch.randn(pixels.shape, generator=random)
        times = torch.randint(0, 50, (len(pixels),), generator=random)
        return F.mse_loss(model(self.scheduler.add_noise(pixels, noise, times), times).sample, noise)

    def saved(self, model, plain, folder):
        """By the library's own way."""
        model.save_pretrained(folder)
        again = type(plain).from_pretrained(folder).train()
        assert type(again) is library("diffusers").UNet2DModel
        return again


ROADS = (
    Classifier, ConvolutionalClassifier, Segmentation, Detection, Regions, Masks, Whole, WholeRegions, WholeMasks,
    Diffusion,
)  # fmt: skip


def train(road, model, data, state=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    found = []
    for pixels, labels in data:
        loss = road.loss(model, pixels, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, optimizer.state_dict()


def assert_alike(road, found, expected):
    assert len(found) == len(expected)
    assert found[: road.alike] == pytest.approx(expected[: road.alike], rel=2e-3)
    assert found == pytest.approx(expected, rel=2e-3 if road.alike == STEPS else 6e-2)


@pytest.mark.usefixtures("operators", "parts_at_once")
@pytest.mark.parametrize("kind", ROADS)
def test_training_saving_and_resuming(kind, tmp_path):
    road, data = kind(), images()
    first, more = data[:STEPS], data[STEPS:]
    torch.manual_seed(0)
    plain = road.make()
    ours = road.wrap(copy.deepcopy(plain))
    (found, state), (expected, _) = train(road, ours, first), train(road, plain, first)
    assert_alike(road, found, expected)
    for report in road.reports(ours):
        assert report.captured and report.engine_calls == STEPS and not report.python_ops, str(report)
        assert report.weights_in_engine >= WORK, str(report)
    again = road.saved(ours, plain, tmp_path)
    for a, b in zip(again.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)
    resumed, _ = train(road, road.wrap(again), more, state)
    assert_alike(road, resumed, train(road, ours, more, state)[0])
