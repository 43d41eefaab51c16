"""`onnxruntime.training`, which is ortmodule."""
