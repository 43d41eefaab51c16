"""Keys of JSON files in the original's style become names of settings."""

from ortmodule.core.config import VARIABLES
from ortmodule.core.settings.original_keys import DEBUG_OPTIONS, KEYS, from_original


def test_every_translation_is_a_setting():
    named = {name for name in (*KEYS.values(), *DEBUG_OPTIONS.values()) if name}
    assert named <= set(VARIABLES)


def test_translates():
    given = {
        "FallbackPolicy": "FALLBACK_DISABLE",
        "OnnxOpsetVersion": 17,
        "PropagateCastOps": {"Level": 2},
        "STRICT": 1,
    }
    assert from_original(given) == {"FALLBACK_POLICY": "FALLBACK_DISABLE", "ONNX_OPSET_VERSION": 17, "STRICT": 1}


def test_debug_options():
    given = {"DebugOptions": {"LogLevel": "INFO", "SaveONNX": True, "Else": 1}}
    assert from_original(given) == {"LOG_LEVEL": "INFO", "SAVE_ONNX": True, "Else": 1}
    assert from_original({"DebugOptions": "text"}) == {"DebugOptions": "text"}  # refused later, by its name
