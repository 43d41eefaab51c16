"""Translates the keys of a JSON file in the original's style (`SaveONNX`, `FallbackPolicy`) to names of settings."""

from __future__ import annotations

from typing import Any

#: The original's key -> the setting that it is now; "": it says what the engine does, or never does, by itself.
KEYS = {
    "FallbackPolicy": "FALLBACK_POLICY",
    "SkipCheck": "SKIPCHECK_POLICY",
    "OnnxOpsetVersion": "ONNX_OPSET_VERSION",
    "EnableCustomAutogradFunction": "ENABLE_CUSTOM_AUTOGRAD",
    "PropagateCastOps": "",
    "UseExternalGPUAllocator": "",
    "AllowLayerNormModPrecision": "",
    "EnableGradAccOptimization": "",
    "UseStaticShape": "",
    "RunSymbolicShapeInference": "",
    "UseMemoryEfficientGradient": "",
}
DEBUG_OPTIONS = {"LogLevel": "LOG_LEVEL", "SaveONNX": "SAVE_ONNX", "ONNXPrefix": "ONNX_PREFIX"}


def from_original(content: dict[str, Any]) -> dict[str, Any]:
    """``content`` with names of settings in place of the original's keys; other keys stay as they are."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        setting = KEYS.get(key, key)
        if key == "DebugOptions" and isinstance(value, dict):
            found |= {DEBUG_OPTIONS.get(option, str(option)): part for option, part in value.items()}
        elif setting:
            found[setting] = value
    return found
