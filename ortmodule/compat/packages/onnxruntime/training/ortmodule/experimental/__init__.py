"""Holds what was experimental in ONNX Runtime's ORTModule."""
