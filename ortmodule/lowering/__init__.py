"""Turns a traced graph of PyTorch into ONNX: decompositions, types, symbolics, export."""
