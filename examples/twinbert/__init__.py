"""Trains TwinBERT with DeepSpeed, ORTModule, FusedAdam and FP16_Optimizer."""
