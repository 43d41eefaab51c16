"""Imports once what every process of a run over many models begins with."""

import warnings

import torch
import torch.onnx
import transformers
import transformers.loss.loss_utils
import transformers.modeling_utils
import transformers.models.auto.modeling_auto

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
