"""Stands for `optimum.onnxruntime` where there is none: its trainers are those of `ortmodule.hf`."""

from ortmodule.hf import ORTSeq2SeqTrainer, ORTSeq2SeqTrainingArguments, ORTTrainer, ORTTrainingArguments

__all__ = ["ORTSeq2SeqTrainer", "ORTSeq2SeqTrainingArguments", "ORTTrainer", "ORTTrainingArguments"]
